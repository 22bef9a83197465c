//! A growing array with a free list: nodes name each other by index, so that dropping a tree of
//! any depth takes no recursion.

use std::ops::{Index, IndexMut};

/// The absent index.
pub(super) const NIL: u32 = u32::MAX;

#[derive(Debug, Clone)]
pub(super) struct Slab<T> {
    items: Vec<T>,
    vacant: Vec<u32>,
}

impl<T: Default> Slab<T> {
    pub(super) fn new() -> Self {
        Self { items: Vec::new(), vacant: Vec::new() }
    }

    pub(super) fn insert(&mut self, item: T) -> u32 {
        if let Some(id) = self.vacant.pop() {
            self.items[id as usize] = item;
            id
        } else {
            self.items.push(item);
            (self.items.len() - 1) as u32
        }
    }

    pub(super) fn remove(&mut self, id: u32) -> T {
        self.vacant.push(id);
        std::mem::take(&mut self.items[id as usize])
    }

    /// One past the largest index in use.
    pub(super) fn bound(&self) -> u32 {
        self.items.len() as u32
    }

    pub(super) fn len(&self) -> usize {
        self.items.len() - self.vacant.len()
    }

    /// Which indices are in use.
    pub(super) fn occupied(&self) -> Vec<bool> {
        let mut occupied = vec![true; self.items.len()];
        for &id in &self.vacant {
            occupied[id as usize] = false;
        }
        occupied
    }
}

impl<T> Index<u32> for Slab<T> {
    type Output = T;

    fn index(&self, id: u32) -> &T {
        &self.items[id as usize]
    }
}

impl<T> IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, id: u32) -> &mut T {
        &mut self.items[id as usize]
    }
}
