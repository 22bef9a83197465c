//! Which row of a table belongs to what, kept from step to step.

use std::hash::Hash;

use hashbrown::HashMap;

/// Rows of one table by key: a key that stays in use keeps its row.
#[derive(Debug)]
pub(super) struct RowMap<K> {
    rows: HashMap<K, u32, foldhash::fast::RandomState>,
    /// The keys in use, with their rows, in the order of the last assignment.
    in_use: Vec<(K, u32)>,
    /// A buffer for those of the next one.
    next: Vec<(K, u32)>,
    /// For each row, the assignment that used it last, and its place in `in_use`.
    used_at: Vec<u64>,
    place: Vec<u32>,
    free: Vec<u32>,
    assignment: u64,
}

/// A row given to a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Assigned {
    pub row: u32,
    /// The key had no row before.
    pub is_new: bool,
}

impl<K: Copy + Eq + Hash> RowMap<K> {
    pub fn new(capacity: u32) -> Self {
        Self {
            rows: HashMap::default(),
            in_use: Vec::new(),
            next: Vec::new(),
            used_at: vec![0; capacity as usize],
            place: vec![0; capacity as usize],
            free: (0..capacity).rev().collect(),
            assignment: 0,
        }
    }

    pub fn capacity(&self) -> usize {
        self.used_at.len()
    }

    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    pub fn get(&self, key: &K) -> Option<u32> {
        self.rows.get(key).copied()
    }

    /// Gives a row to each of `keys`, which are distinct and no more than the capacity, and takes
    /// back the rows of all others.
    pub fn assign(&mut self, keys: impl Iterator<Item = K>, assigned: &mut Vec<Assigned>) {
        self.assignment += 1;
        assigned.clear();
        let mut next = std::mem::take(&mut self.next);
        next.clear();
        // Most keys come in the order of the last time: there is no need to look them up.
        let mut expected = 0;
        next.extend(keys.map(|key| {
            let row = match self.in_use.get(expected) {
                Some(&(same, row)) if same == key => row,
                _ => self.rows.get(&key).copied().unwrap_or(u32::MAX),
            };
            if let Some(place) = self.place.get(row as usize) {
                expected = *place as usize + 1;
                self.used_at[row as usize] = self.assignment;
            }
            (key, row)
        }));
        for (key, row) in self.in_use.drain(..).rev() {
            if self.used_at[row as usize] != self.assignment {
                self.rows.remove(&key);
                self.free.push(row);
            }
        }
        for (place, (key, row)) in (0..).zip(&mut next) {
            let is_new = *row == u32::MAX;
            if is_new {
                *row = self.take(*key);
            }
            self.place[*row as usize] = place;
            assigned.push(Assigned { row: *row, is_new });
        }
        self.next = std::mem::replace(&mut self.in_use, next);
    }

    /// Gives a free row to one more key. The caller has checked that there is one.
    pub fn add(&mut self, key: K) -> u32 {
        let row = self.take(key);
        self.place[row as usize] = self.in_use.len() as u32;
        self.in_use.push((key, row));
        row
    }

    fn take(&mut self, key: K) -> u32 {
        let row = self.free.pop().expect("the caller keeps within the capacity");
        self.used_at[row as usize] = self.assignment;
        self.rows.insert(key, row);
        row
    }
}
