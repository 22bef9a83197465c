//! Finding a child: by its full first chunk, and by its first token for partial heads.

use std::hash::{BuildHasher, Hash, Hasher};

use foldhash::quality::RandomState;
use hashbrown::HashTable;

use super::PrefixTree;
use super::slab::NIL;

/// Two tables over all segments with a parent. Hashes are seeded at random and only ever narrow
/// the search: equality is by parent and tokens.
#[derive(Debug, Clone, Default)]
pub(super) struct ChildIndex {
    /// Segments whose first chunk is full and known, one for each (parent, tokens).
    pub by_chunk: HashTable<u32>,
    /// The other segments with such a first chunk, which wait to take over.
    pub twins: HashTable<u32>,
    /// For each (parent, first token), the most recently attached child; the others follow by
    /// `chain_next`.
    pub by_token: HashTable<u32>,
    state: RandomState,
}

fn hash_token(state: &RandomState, parent: u32, token: u32) -> u64 {
    state.hash_one(u64::from(parent) << 32 | u64::from(token))
}

impl ChildIndex {
    fn hash_chunk(&self, parent: u32, tokens: &[u32]) -> u64 {
        let mut hasher = self.state.build_hasher();
        hasher.write_u32(parent);
        tokens.hash(&mut hasher);
        hasher.finish()
    }

    fn hash_token(&self, parent: u32, token: u32) -> u64 {
        hash_token(&self.state, parent, token)
    }

    pub(super) fn hash_salt(&self, salt: &[u8]) -> u64 {
        self.state.hash_one(salt)
    }
}

impl PrefixTree {
    /// The indexed child of `parent` whose first chunk is `chunk`.
    pub(super) fn find_child(&self, parent: u32, chunk: &[u32]) -> Option<u32> {
        let hash = self.index.hash_chunk(parent, chunk);
        self.find_child_hashed(hash, parent, chunk)
    }

    fn find_child_hashed(&self, hash: u64, parent: u32, chunk: &[u32]) -> Option<u32> {
        let found = self.index.by_chunk.find(hash, |&id| {
            self.segments[id].parent == parent && &self.known_tokens(id)[..chunk.len()] == chunk
        });
        found.copied()
    }

    /// Puts `segment` into the table of full first chunks, if its first chunk is full and known, or
    /// among the twins if a sibling with the same one is there already.
    pub(super) fn index_first_chunk(&mut self, segment: u32) {
        let chunk_size = self.chunk_size as usize;
        if !self.sharing || self.segments[segment].known < self.chunk_size {
            return;
        }
        let parent = self.segments[segment].parent;
        let chunk = &self.known_tokens(segment)[..chunk_size];
        let hash = self.index.hash_chunk(parent, chunk);
        let twin = self.find_child_hashed(hash, parent, chunk).is_some();
        if twin && self.segments[segment].twin {
            return;
        }
        let Self { index, segments, .. } = self;
        let table = if twin { &mut index.twins } else { &mut index.by_chunk };
        table.insert_unique(hash, segment, |&id| segments[id].hash);
        segments[segment].hash = hash;
        segments[segment].indexed = !twin;
        segments[segment].twin = twin;
    }

    /// Takes `segment` out of the table of full first chunks, or from among the twins. Its place
    /// in the table goes to a twin; its tokens must still be there.
    pub(super) fn unindex_first_chunk(&mut self, segment: u32) {
        let s = &mut self.segments[segment];
        let hash = s.hash;
        if std::mem::take(&mut s.twin) {
            if let Ok(entry) = self.index.twins.find_entry(hash, |&id| id == segment) {
                entry.remove();
            }
        } else if std::mem::take(&mut s.indexed) {
            if let Ok(entry) = self.index.by_chunk.find_entry(hash, |&id| id == segment) {
                entry.remove();
            }
            self.promote_twin(segment, hash);
        }
    }

    /// Lets a twin of `segment`, which has left the table, take its place there.
    fn promote_twin(&mut self, segment: u32, hash: u64) {
        if self.index.twins.is_empty() {
            return;
        }
        let Self { index, segments, runs, chunk_size, .. } = self;
        let chunk = |id: u32| {
            let s = &segments[id];
            let begin = s.first_chunk as usize * *chunk_size as usize;
            &runs[s.run].tokens[begin..begin + *chunk_size as usize]
        };
        let parent = segments[segment].parent;
        let same = |&id: &u32| segments[id].parent == parent && chunk(id) == chunk(segment);
        let Ok(entry) = index.twins.find_entry(hash, same) else { return };
        let (twin, _) = entry.remove();
        index.by_chunk.insert_unique(hash, twin, |&id| segments[id].hash);
        segments[twin].twin = false;
        segments[twin].indexed = true;
    }

    /// Lets `to` stand in the tables of first chunks where `from` stood; both have the same parent
    /// and first chunk.
    pub(super) fn replace_indexed(&mut self, from: u32, to: u32) {
        let f = &mut self.segments[from];
        let hash = f.hash;
        let (indexed, twin) = (std::mem::take(&mut f.indexed), std::mem::take(&mut f.twin));
        let t = &mut self.segments[to];
        (t.hash, t.indexed, t.twin) = (hash, indexed, twin);
        if !indexed && !twin {
            return;
        }
        let table = if twin { &mut self.index.twins } else { &mut self.index.by_chunk };
        if let Some(entry) = table.find_mut(hash, |&id| id == from) {
            *entry = to;
        }
    }

    /// The most recently attached child of `parent` that begins with `token`, or `NIL`.
    pub(super) fn chain_head(&self, parent: u32, token: u32) -> u32 {
        let hash = self.index.hash_token(parent, token);
        let found = self.index.by_token.find(hash, |&id| {
            let s = &self.segments[id];
            s.parent == parent && s.first_token == token
        });
        found.copied().unwrap_or(NIL)
    }

    /// Puts `segment` at the head of its chain, once its first token is known. Chunks of one token
    /// have no partial heads, so they need no chains.
    pub(super) fn chain(&mut self, segment: u32) {
        let s = &self.segments[segment];
        if !self.sharing || self.chunk_size == 1 || s.known == 0 || s.chained {
            return;
        }
        let (parent, token) = (s.parent, self.known_tokens(segment)[0]);
        self.segments[segment].first_token = token;
        let head = self.chain_head(parent, token);
        let hash = self.index.hash_token(parent, token);
        self.segments[segment].chained = true;
        self.segments[segment].chain_prev = NIL;
        self.segments[segment].chain_next = head;
        let Self { index: ChildIndex { by_token, state, .. }, segments, .. } = self;
        if head == NIL {
            by_token.insert_unique(hash, segment, |&id| {
                hash_token(state, segments[id].parent, segments[id].first_token)
            });
        } else {
            segments[head].chain_prev = segment;
            if let Some(entry) = by_token.find_mut(hash, |&id| id == head) {
                *entry = segment;
            }
        }
    }

    /// Takes `segment` out of its chain, if it is in one.
    pub(super) fn unchain(&mut self, segment: u32) {
        if !std::mem::take(&mut self.segments[segment].chained) {
            return;
        }
        let s = &self.segments[segment];
        let (parent, token) = (s.parent, s.first_token);
        let (prev, next) = (s.chain_prev, s.chain_next);
        if next != NIL {
            self.segments[next].chain_prev = prev;
        }
        if prev != NIL {
            self.segments[prev].chain_next = next;
            return;
        }
        let hash = self.index.hash_token(parent, token);
        if let Ok(mut entry) = self.index.by_token.find_entry(hash, |&id| id == segment) {
            if next == NIL {
                entry.remove();
            } else {
                *entry.get_mut() = next;
            }
        }
    }

    /// Gives the place of `from` in its chain to `to`; both have the same parent and first token.
    pub(super) fn replace_chained(&mut self, from: u32, to: u32) {
        if !std::mem::take(&mut self.segments[from].chained) {
            return;
        }
        let (prev, next) = (self.segments[from].chain_prev, self.segments[from].chain_next);
        self.segments[to].chain_prev = prev;
        self.segments[to].chain_next = next;
        self.segments[to].chained = true;
        self.segments[to].first_token = self.segments[from].first_token;
        if next != NIL {
            self.segments[next].chain_prev = to;
        }
        if prev != NIL {
            self.segments[prev].chain_next = to;
            return;
        }
        let (parent, token) = (self.segments[to].parent, self.segments[to].first_token);
        let hash = self.index.hash_token(parent, token);
        if let Some(entry) = self.index.by_token.find_mut(hash, |&id| id == from) {
            *entry = to;
        }
    }
}
