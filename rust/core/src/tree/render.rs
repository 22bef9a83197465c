//! The tree as text.

use std::fmt::Write;

use super::PrefixTree;
use super::slab::NIL;

/// Token ids that a line shows before it stops.
const SHOWN_TOKENS: usize = 8;

impl PrefixTree {
    /// A drawing of the tree, one line for each segment: its chunks, tokens, whether they are
    /// written, the sequences that pass through it and those that end there.
    pub fn render(&self) -> String {
        let mut out = format!(
            "capacity {} chunks of {} tokens: {} in use, {} evictable, {} free\n",
            self.pool.capacity(),
            self.chunk_size,
            self.pool.capacity() - self.pool.num_free() - self.num_evictable(),
            self.num_evictable(),
            self.pool.num_free(),
        );
        let mut namespaces: Vec<_> = self.namespaces.iter().collect();
        namespaces.sort_by(|a, b| a.salt.cmp(&b.salt));
        for namespace in namespaces {
            let salt = String::from_utf8_lossy(&namespace.salt);
            // Writing to a string cannot fail.
            let _ = writeln!(out, "namespace {salt:?}");
            self.render_below(namespace.root, &mut out);
        }
        out
    }

    fn render_below(&self, root: u32, out: &mut String) {
        // Segments to draw, each with the bars that lead to it.
        let mut pending: Vec<(u32, String)> = Vec::new();
        // Children are listed newest first, so that the oldest one is drawn first.
        let push_children = |parent: u32, bars: &str, pending: &mut Vec<(u32, String)>| {
            pending.extend(self.children(parent).map(|child| (child, bars.to_owned())));
        };
        push_children(root, "", &mut pending);
        while let Some((segment, bars)) = pending.pop() {
            let is_last = self.segments[segment].prev == NIL;
            let (branch, bar) = if is_last { ("`-- ", "    ") } else { ("|-- ", "|   ") };
            let _ = writeln!(out, "{bars}{branch}{}", self.render_segment(segment));
            push_children(segment, &format!("{bars}{bar}"), &mut pending);
        }
    }

    fn render_segment(&self, segment: u32) -> String {
        let s = &self.segments[segment];
        let chunks = s.num_chunks(self.chunk_size);
        let known = self.known_tokens(segment);
        let mut tokens: Vec<String> = known.iter().take(SHOWN_TOKENS).map(u32::to_string).collect();
        if known.len() > SHOWN_TOKENS {
            tokens.push("..".to_owned());
        }
        if s.known < s.len {
            tokens.push(format!("{} reserved", s.len - s.known));
        }
        let mut line = format!(
            "[{}, {}) {chunks} chunk{} ({}), {} live",
            s.start,
            s.end(),
            if chunks == 1 { "" } else { "s" },
            tokens.join(" "),
            s.live,
        );
        if s.filled < s.len {
            let _ = write!(line, ", {} of {} written", s.filled, s.len);
        }
        if s.pins > 0 {
            let _ = write!(line, ", {} pinned", s.pins);
        }
        if s.is_retained() {
            line.push_str(", retained");
        }
        let mut slot = s.first_end;
        while slot != NIL {
            let _ = write!(line, " <{}>", self.sequences.handle(slot));
            slot = self.sequences[slot].next_end;
        }
        line
    }
}
