//! How attention is computed, and on which threads.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::available_parallelism;

use chunkcache::attention::{AttentionParams, Isa, Sharing, Workers};
use chunkcache::error::{Error, Result};
use pyo3::prelude::*;

use crate::args::{self, IntoPython, real, refused};
use crate::described::described;
use crate::errors::to_python;

/// `chunkcache.attention.Options` as Python passes it: a tuple of its fields.
#[derive(Debug)]
pub struct Options {
    sm_scale: Option<f32>,
    logits_soft_cap: Option<f32>,
    window_left: i32,
    sharing: Sharing,
    isa: Isa,
}

impl<'py> FromPyObject<'_, 'py> for Options {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (sm_scale, logits_soft_cap, window_left, sharing, isa) = object.extract::<(
            Bound<'py, PyAny>,
            Bound<'py, PyAny>,
            Bound<'py, PyAny>,
            Bound<'py, PyAny>,
            Bound<'py, PyAny>,
        )>()?;
        Ok(Self {
            sm_scale: scale(&sm_scale)?,
            logits_soft_cap: soft_cap(&logits_soft_cap)?,
            window_left: args::window_left(&window_left)?,
            sharing: named("sharing", &sharing, &SHARING)?,
            isa: match isa.is_none() {
                true => Isa::detect(),
                false => named("isa", &isa, &Isa::ALL.map(|isa| (isa.to_string(), isa)))?,
            },
        })
    }
}

impl Options {
    /// The parameters for rows of `head_dim` elements.
    pub fn params(&self, head_dim: usize) -> AttentionParams {
        let usual = AttentionParams::new(head_dim);
        AttentionParams {
            sm_scale: self.sm_scale.unwrap_or(usual.sm_scale),
            logits_soft_cap: self.logits_soft_cap,
            window_left: self.window_left,
            sharing: self.sharing,
            isa: self.isa,
        }
    }
}

const SHARING: [(&str, Sharing); 3] =
    [("auto", Sharing::Auto), ("always", Sharing::Always), ("never", Sharing::Never)];

fn scale(object: &Bound<'_, PyAny>) -> PyResult<Option<f32>> {
    if object.is_none() {
        return Ok(None);
    }
    let scale = real(object).map(|scale| scale as f32).filter(|scale| scale.is_finite());
    scale.map(Some).ok_or_else(|| refused("sm_scale", object, "a finite float32, or None"))
}

fn soft_cap(object: &Bound<'_, PyAny>) -> PyResult<Option<f32>> {
    if object.is_none() || real(object) == Some(0.0) {
        return Ok(None);
    }
    let cap = real(object).map(|cap| cap as f32).filter(|cap| cap.is_finite() && *cap > 0.0);
    let allowed = "a finite float32 above 0, or 0 or None for no cap";
    cap.map(Some).ok_or_else(|| refused("logits_soft_cap", object, allowed))
}

fn named<T: Copy>(
    argument: &str,
    object: &Bound<'_, PyAny>,
    values: &[(impl AsRef<str>, T)],
) -> PyResult<T> {
    let given: Option<String> = object.extract().ok();
    let found = values.iter().find(|(name, _)| given.as_deref() == Some(name.as_ref()));
    match found {
        Some(&(_, value)) => Ok(value),
        None => {
            let names: Vec<&str> = values.iter().map(|(name, _)| name.as_ref()).collect();
            let given = given.unwrap_or_else(|| described(object));
            let error = Error::invalid(argument, given, names.join(", "));
            Err(to_python(object.py(), error))
        }
    }
}

/// Threads of a number that the caller gave, or as many as there are cores.
pub fn workers(num_threads: Option<usize>) -> Result<Workers> {
    let cores = || available_parallelism().map_or(1, std::num::NonZero::get);
    Workers::new(num_threads.unwrap_or_else(cores))
}

/// The threads of the last call without a cache; another number replaces them.
pub fn kept_workers(py: Python<'_>, num_threads: Option<usize>) -> PyResult<Arc<Workers>> {
    static KEPT: Mutex<Option<(Option<usize>, Arc<Workers>)>> = Mutex::new(None);
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((number, workers)) = &*kept
        && *number == num_threads
    {
        return Ok(Arc::clone(workers));
    }
    let made = Arc::new(workers(num_threads).into_python(py)?);
    *kept = Some((num_threads, Arc::clone(&made)));
    Ok(made)
}
