//! Invariants of the tables: the eviction list, first chunks, chains and pins.

use std::collections::{HashMap, HashSet};

use super::super::PrefixTree;
use super::super::slab::NIL;
use super::ensure;

impl PrefixTree {
    pub(super) fn check_eviction_list(&self, segments: &[u32]) -> Result<(), String> {
        let mut place = HashMap::new();
        let mut prev = NIL;
        let mut segment = self.lru.head;
        while segment != NIL {
            ensure!(9, segment < self.segments.bound(), "the list names segment {segment}");
            let s = &self.segments[segment];
            ensure!(9, s.lru_prev == prev, "segment {segment} follows {}, not {prev}", s.lru_prev);
            let listed = place.insert(segment, place.len()).is_some();
            ensure!(9, !listed, "segment {segment} is listed twice");
            prev = segment;
            segment = s.lru_next;
        }
        ensure!(9, self.lru.tail == prev, "the list ends with {}, not {prev}", self.lru.tail);
        let mut retained = 0;
        for &id in segments {
            let s = &self.segments[id];
            if s.is_root() || !s.is_retained() {
                ensure!(9, !place.contains_key(&id), "segment {id} is listed but not retained");
                continue;
            }
            retained += 1;
            ensure!(9, place.contains_key(&id), "retained segment {id} is not listed");
            if let Some(parent) = place.get(&s.parent) {
                ensure!(
                    9,
                    place[&id] < *parent,
                    "segment {id} comes after its parent {}",
                    s.parent
                );
            }
        }
        ensure!(9, retained == place.len(), "{} listed, {retained} retained", place.len());
        Ok(())
    }

    pub(super) fn check_retained(&self, segments: &[u32]) -> Result<(), String> {
        for &id in segments {
            let s = &self.segments[id];
            if s.is_root() || !s.is_retained() {
                continue;
            }
            ensure!(18, self.sharing, "segment {id} is retained");
            let whole =
                s.len.is_multiple_of(self.chunk_size) && s.known == s.len && s.filled == s.len;
            ensure!(10, whole, "retained segment {id} has {} written of {}", s.filled, s.len);
            ensure!(10, s.indexed, "retained segment {id} is not in the table");
        }
        Ok(())
    }

    pub(super) fn check_first_chunks(&self, segments: &[u32]) -> Result<(), String> {
        let marked: Vec<u32> =
            segments.iter().copied().filter(|&id| self.segments[id].indexed).collect();
        let count = self.index.by_chunk.len();
        ensure!(11, count == marked.len(), "{count} in the table, {} marked", marked.len());
        for id in marked {
            let s = &self.segments[id];
            let full = !s.is_root() && s.known >= self.chunk_size;
            ensure!(11, full, "segment {id} is in the table without a full first chunk");
            let found =
                self.find_child(s.parent, &self.known_tokens(id)[..self.chunk_size as usize]);
            ensure!(11, found == Some(id), "the first chunk of segment {id} finds {found:?}");
        }
        self.check_twins(segments)
    }

    fn check_twins(&self, segments: &[u32]) -> Result<(), String> {
        let mut count = 0;
        for &id in segments {
            let s = &self.segments[id];
            if s.is_root() || !self.sharing || s.known < self.chunk_size {
                ensure!(11, !s.twin, "segment {id} is a twin without a full first chunk");
                continue;
            }
            ensure!(11, s.twin != s.indexed, "segment {id}: twin and indexed are {}", s.twin);
            if s.twin {
                count += 1;
                let chunk = &self.known_tokens(id)[..self.chunk_size as usize];
                let found = self.find_child(s.parent, chunk);
                ensure!(11, found.is_some(), "twin {id} could be in the table");
                let listed = self.index.twins.find(s.hash, |&twin| twin == id);
                ensure!(11, listed.is_some(), "twin {id} is not listed");
            }
        }
        let listed = self.index.twins.len();
        ensure!(11, listed == count, "{listed} twins listed, {count} marked");
        Ok(())
    }

    pub(super) fn check_chains(&self, segments: &[u32]) -> Result<(), String> {
        let mut heads = HashSet::new();
        for &id in segments {
            let s = &self.segments[id];
            let wanted = self.sharing && self.chunk_size > 1 && s.known > 0;
            ensure!(12, s.chained == wanted, "segment {id}: chained is {}", s.chained);
            if !wanted {
                continue;
            }
            let token = self.known_tokens(id)[0];
            let head = self.chain_head(s.parent, token);
            if s.chain_prev == NIL {
                ensure!(12, head == id, "token {token} finds segment {head}, not {id}");
            } else {
                let prev = &self.segments[s.chain_prev];
                ensure!(12, prev.chain_next == id, "segment {id} is not after {}", s.chain_prev);
                let same = prev.parent == s.parent && self.known_tokens(s.chain_prev)[0] == token;
                ensure!(12, same, "segment {id} is in another chain's place");
            }
            heads.insert((s.parent, token));
        }
        let count = self.index.by_token.len();
        ensure!(12, count == heads.len(), "{count} chains in the table, {} in use", heads.len());
        Ok(())
    }

    pub(super) fn check_pins(&self, segments: &[u32]) -> Result<(), String> {
        let mut ends: HashMap<u32, u32> = HashMap::new();
        for pin in self.pins.slots.iter().filter(|pin| pin.segment != NIL) {
            *ends.entry(pin.segment).or_default() += 1;
        }
        for &id in segments {
            let s = &self.segments[id];
            let count = ends.remove(&id).unwrap_or(0);
            ensure!(16, s.pin_ends == count, "segment {id} counts {} of {count} pins", s.pin_ends);
            if s.pins > 0 && !s.is_root() {
                let whole =
                    s.len.is_multiple_of(self.chunk_size) && s.known == s.len && s.filled == s.len;
                ensure!(16, whole, "pinned segment {id} has {} written of {}", s.filled, s.len);
            }
        }
        ensure!(16, ends.is_empty(), "pins end at segments that are gone: {:?}", ends.keys());
        Ok(())
    }
}
