//! One root per namespace: nothing is shared across a `cache_salt`.

use hashbrown::HashTable;

use super::PrefixTree;
use super::segment::Segment;
use super::slab::NIL;

#[derive(Debug, Clone)]
pub(super) struct Namespace {
    pub salt: Box<[u8]>,
    pub root: u32,
}

/// The roots by their salts, compared as whole byte strings.
pub(super) type Namespaces = HashTable<Namespace>;

impl PrefixTree {
    pub(super) fn find_root(&self, salt: &[u8]) -> Option<u32> {
        let hash = self.index.hash_salt(salt);
        self.namespaces.find(hash, |namespace| *namespace.salt == *salt).map(|found| found.root)
    }

    pub(super) fn make_root(&mut self, salt: &[u8]) -> u32 {
        let hash = self.index.hash_salt(salt);
        let root = self.segments.insert(Segment { hash, ..Segment::default() });
        let namespace = Namespace { salt: salt.into(), root };
        let Self { namespaces, segments, .. } = self;
        namespaces.insert_unique(hash, namespace, |other| segments[other.root].hash);
        root
    }

    /// Drops `segment` if it is the root of a namespace that nothing is left of.
    pub(super) fn prune_root(&mut self, segment: u32) {
        let s = &self.segments[segment];
        if !s.is_root() || s.first_child != NIL || !s.is_retained() {
            return;
        }
        if let Ok(entry) = self.namespaces.find_entry(s.hash, |found| found.root == segment) {
            entry.remove();
        }
        self.segments.remove(segment);
    }
}
