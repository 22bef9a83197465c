//! Pinned prefixes: kept although no sequence uses them, for good or for a time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use super::PrefixTree;
use super::slab::NIL;
use super::types::{PinHandle, Pinned};
use crate::error::{Error, Result};

/// Ends of pins that are kept before it pays to look for those that were taken back.
const MIN_EXPIRIES: usize = 64;

#[derive(Debug, Clone, Copy)]
pub(super) struct Pin {
    pub generation: u32,
    /// The segment at whose end the pinned prefix ends; `NIL` for a free slot.
    pub segment: u32,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Pins {
    pub slots: Vec<Pin>,
    vacant: Vec<u32>,
    /// Ends of the pins with a time to live, the next one first; some may be unpinned already.
    expiries: BinaryHeap<Reverse<(Duration, PinHandle)>>,
}

impl Pins {
    fn open(&mut self, segment: u32) -> PinHandle {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(Pin { generation: 0, segment: NIL });
            (self.slots.len() - 1) as u32
        });
        let pin = &mut self.slots[slot as usize];
        pin.segment = segment;
        PinHandle::new(slot, pin.generation)
    }

    fn is_open(&self, handle: PinHandle) -> bool {
        let pin = self.slots.get(handle.slot() as usize);
        pin.is_some_and(|pin| pin.segment != NIL && pin.generation == handle.generation())
    }

    fn close(&mut self, handle: PinHandle) -> Option<u32> {
        if !self.is_open(handle) {
            return None;
        }
        let pin = &mut self.slots[handle.slot() as usize];
        pin.generation = pin.generation.wrapping_add(1);
        self.vacant.push(handle.slot());
        Some(std::mem::replace(&mut pin.segment, NIL))
    }
}

impl Pins {
    /// Drops the ends of pins that were taken back, once they are the greater part.
    fn forget_ended(&mut self) {
        let num_open = self.slots.len() - self.vacant.len();
        if self.expiries.len() > 2 * num_open + MIN_EXPIRIES {
            let mut expiries = std::mem::take(&mut self.expiries);
            expiries.retain(|&Reverse((_, pin))| self.is_open(pin));
            self.expiries = expiries;
        }
    }
}

impl PrefixTree {
    /// Keeps the cached part of a prompt from eviction: its full chunks that are written.
    ///
    /// With a time to live, the pin ends by itself at the first changing operation after it.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if no full chunk of the prompt is written.
    pub fn pin(
        &mut self,
        tokens: &[u32],
        salt: &[u8],
        time_to_live: Option<Duration>,
    ) -> Result<Pinned> {
        self.expire_pins();
        let nothing_cached = || {
            let given = format!("{} tokens, no full chunk of which is written", tokens.len());
            Error::invalid("tokens", given, "a prompt with a cached prefix")
        };
        let root = self.find_root(salt).ok_or_else(nothing_cached)?;
        let mut walk = self.walk(root, tokens);
        let written = self.matched_path(walk).0 as u32;
        let num_tokens = self.chunk_begin(written);
        if num_tokens == 0 {
            return Err(nothing_cached());
        }
        while self.segments[walk.segment].start >= num_tokens {
            walk.segment = self.segments[walk.segment].parent;
        }
        let s = &self.segments[walk.segment];
        let segment = if s.end() == num_tokens {
            walk.segment
        } else {
            self.split(walk.segment, (num_tokens - s.start) / self.chunk_size)
        };
        self.segments[segment].pin_ends += 1;
        let mut held = segment;
        while held != NIL {
            if !self.segments[held].is_root() && self.segments[held].is_retained() {
                self.lru_remove(held);
            }
            self.update(held, |s| s.pins += 1);
            held = self.segments[held].parent;
        }
        let pin = self.pins.open(segment);
        let expires_at = time_to_live.map(|time| self.clock.now().saturating_add(time));
        if let Some(end) = expires_at {
            self.pins.expiries.push(Reverse((end, pin)));
        }
        Ok(Pinned { pin, num_tokens: num_tokens as usize, expires_at })
    }

    /// Ends a pin: its chunks become evictable, unless something else holds them.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if the pin does not exist or has ended.
    pub fn unpin(&mut self, pin: PinHandle) -> Result<()> {
        self.expire_pins();
        if !self.end_pin(pin) {
            return Err(Error::invalid("pin", pin, "a pin that was made and has not ended"));
        }
        self.pins.forget_ended();
        Ok(())
    }

    fn end_pin(&mut self, pin: PinHandle) -> bool {
        let Some(end) = self.pins.close(pin) else { return false };
        self.segments[end].pin_ends -= 1;
        let mut segment = end;
        while segment != NIL {
            let parent = self.segments[segment].parent;
            self.update(segment, |s| s.pins -= 1);
            let s = &self.segments[segment];
            if s.is_root() {
                self.prune_root(segment);
            } else if s.is_retained() {
                self.release_segment(segment, true);
            } else {
                self.merge_into_child(segment);
            }
            segment = parent;
        }
        true
    }

    /// Ends the pins whose time has come.
    pub(super) fn expire_pins(&mut self) {
        while let Some(&Reverse((end, pin))) = self.pins.expiries.peek() {
            if end > self.clock.now() {
                return;
            }
            self.pins.expiries.pop();
            self.end_pin(pin);
        }
    }
}
