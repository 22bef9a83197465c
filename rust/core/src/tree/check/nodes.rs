//! Invariants of the nodes: links, shape, runs, holders, chunks and totals.

use super::super::PrefixTree;
use super::super::segment::Accounts;
use super::super::slab::NIL;
use super::ensure;

impl PrefixTree {
    pub(super) fn check_namespaces(&self, occupied: &[bool]) -> Result<(), String> {
        let roots = (0..self.segments.bound())
            .filter(|&id| occupied[id as usize] && self.segments[id].is_root())
            .count();
        ensure!(
            17,
            roots == self.namespaces.len(),
            "{roots} roots, {} salts",
            self.namespaces.len()
        );
        for namespace in &self.namespaces {
            let root = namespace.root;
            let exists = occupied.get(root as usize).is_some_and(|&occupied| occupied);
            ensure!(17, exists && self.segments[root].is_root(), "segment {root} is no root");
            ensure!(17, self.segments[root].len == 0, "root {root} has tokens");
            ensure!(17, self.segments[root].first_child != NIL, "root {root} has no children");
            let found = self.find_root(&namespace.salt);
            ensure!(17, found == Some(root), "the salt of root {root} finds {found:?}");
        }
        Ok(())
    }

    pub(super) fn check_links(&self, occupied: &[bool]) -> Result<(), String> {
        let mut seen = vec![false; occupied.len()];
        let mut pending: Vec<u32> = self.namespaces.iter().map(|found| found.root).collect();
        while let Some(segment) = pending.pop() {
            let index = segment as usize;
            ensure!(3, occupied.get(index) == Some(&true), "segment {segment} is linked but free");
            ensure!(
                3,
                !std::mem::replace(&mut seen[index], true),
                "segment {segment} is linked twice"
            );
            let mut prev = NIL;
            let mut child = self.segments[segment].first_child;
            while child != NIL {
                let exists = occupied.get(child as usize) == Some(&true);
                ensure!(3, exists, "child {child} of segment {segment} is free");
                let c = &self.segments[child];
                ensure!(
                    3,
                    c.parent == segment,
                    "child {child} of {segment} has parent {}",
                    c.parent
                );
                ensure!(3, c.prev == prev, "child {child} of {segment} follows {}", c.prev);
                let end = self.segments[segment].end();
                ensure!(3, c.start == end, "child {child} begins at {}, not at {end}", c.start);
                ensure!(3, !seen[child as usize], "segment {child} is linked twice");
                pending.push(child);
                prev = child;
                child = c.next;
            }
        }
        for (id, &occupied) in occupied.iter().enumerate() {
            ensure!(3, !occupied || seen[id], "segment {id} hangs on no root");
        }
        Ok(())
    }

    pub(super) fn check_shape(&self, segments: &[u32]) -> Result<(), String> {
        for &id in segments {
            let s = &self.segments[id];
            if s.is_root() {
                continue;
            }
            ensure!(4, s.len > 0, "segment {id} is empty");
            if !s.len.is_multiple_of(self.chunk_size) {
                ensure!(4, s.first_child == NIL, "segment {id} is partial and has children");
                ensure!(4, s.live == 1 && s.pins == 0, "partial segment {id} has {} users", s.live);
            }
            if !self.sharing {
                let holders = s.live + s.pins;
                ensure!(18, holders == 1, "segment {id} has {holders} holders");
            }
        }
        Ok(())
    }

    pub(super) fn check_runs(&self, segments: &[u32]) -> Result<(), String> {
        let mut windows: Vec<u32> = segments.to_vec();
        windows.retain(|&id| !self.segments[id].is_root());
        windows.sort_by_key(|&id| (self.segments[id].run, self.segments[id].first_chunk));
        let occupied = self.runs.occupied();
        let mut used = 0;
        for of_run in windows.chunk_by(|&a, &b| self.segments[a].run == self.segments[b].run) {
            let id = self.segments[of_run[0]].run;
            ensure!(5, occupied.get(id as usize) == Some(&true), "run {id} is used but free");
            used += 1;
            let run = &self.runs[id];
            let count = run.num_segments as usize;
            ensure!(
                5,
                count == of_run.len(),
                "run {id} counts {count} of {} windows",
                of_run.len()
            );
            for pair in of_run.windows(2) {
                let (upper, lower) = (&self.segments[pair[0]], &self.segments[pair[1]]);
                let apart = upper.end_chunk(self.chunk_size) <= lower.first_chunk;
                ensure!(5, apart, "windows {} and {} of run {id} overlap", pair[0], pair[1]);
                let full = upper.len.is_multiple_of(self.chunk_size);
                ensure!(5, full, "window {} of run {id} is partial inside", pair[0]);
                let mut above = lower.parent;
                while above != pair[0] && above != NIL {
                    above = self.segments[above].parent;
                }
                ensure!(5, above != NIL, "window {} of run {id} is not below {}", pair[1], pair[0]);
            }
            let last = &self.segments[of_run[of_run.len() - 1]];
            let end = last.end_chunk(self.chunk_size) as usize;
            ensure!(
                5,
                end == run.chunks.len(),
                "run {id} has {} chunks, not {end}",
                run.chunks.len()
            );
            let tokens = last.first_chunk as usize * self.chunk_size as usize + last.len as usize;
            ensure!(
                5,
                tokens == run.tokens.len(),
                "run {id} has {} tokens, not {tokens}",
                run.tokens.len()
            );
        }
        ensure!(5, used == self.runs.len(), "{} runs, {used} of them used", self.runs.len());
        Ok(())
    }

    pub(super) fn check_holders(&self, segments: &[u32]) -> Result<(), String> {
        for &id in segments {
            let s = &self.segments[id];
            let live: u32 = self.children(id).map(|child| self.segments[child].live).sum();
            let live = live + self.ends_at(id).count() as u32;
            ensure!(6, s.live == live, "segment {id} counts {} sequences of {live}", s.live);
            let pins: u32 = self.children(id).map(|child| self.segments[child].pins).sum();
            let pins = pins + s.pin_ends;
            ensure!(6, s.pins == pins, "segment {id} counts {} pins of {pins}", s.pins);
        }
        Ok(())
    }

    pub(super) fn check_chunks(&self, segments: &[u32]) -> Result<(), String> {
        const FREE: u32 = NIL - 1;
        const HELD: u32 = NIL - 2;
        let name = |owner: u32| match owner {
            FREE => "the free list".to_owned(),
            HELD => "an open step".to_owned(),
            segment => format!("segment {segment}"),
        };
        let mut owners = vec![NIL; self.pool.next_unused() as usize];
        let free = self.pool.returned().iter().map(|&chunk| (chunk, FREE));
        let held = self.steps.held.iter().map(|&(_, chunk)| (chunk, HELD));
        let owned =
            segments.iter().flat_map(|&id| self.chunks(id).iter().map(move |&chunk| (chunk, id)));
        for (chunk, by) in free.chain(held).chain(owned) {
            let known = (chunk as usize) < owners.len();
            ensure!(1, known, "chunk {chunk} of {} was never handed out", name(by));
            let other = std::mem::replace(&mut owners[chunk as usize], by);
            ensure!(1, other == NIL, "chunk {chunk} is in {} and in {}", name(other), name(by));
        }
        let lost = owners.iter().position(|&owner| owner == NIL);
        ensure!(1, lost.is_none(), "chunk {lost:?} is nowhere");
        Ok(())
    }

    pub(super) fn check_accounts(&self, segments: &[u32]) -> Result<(), String> {
        let mut accounts = Accounts::default();
        for &id in segments {
            accounts.add(&self.segments[id], self.chunk_size);
        }
        ensure!(2, accounts == self.accounts, "totals are {:?}, not {accounts:?}", self.accounts);
        let live_or_pinned: usize = segments
            .iter()
            .filter(|&&id| !self.segments[id].is_retained())
            .map(|&id| self.chunks(id).len())
            .sum();
        let in_use = live_or_pinned + self.steps.held.len();
        let (free, evictable) = (self.pool.num_free(), self.num_evictable());
        let sum = free + evictable + in_use;
        ensure!(
            2,
            sum == self.pool.capacity(),
            "{free} free + {evictable} evictable + {in_use} in use are {sum} of {}",
            self.pool.capacity()
        );
        Ok(())
    }
}
