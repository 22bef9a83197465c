//! The part of a tree that one step's sequences span, in depth-first order.

use super::source::{Query, Window};
use super::view::NONE;
use crate::error::Result;
use crate::tree::{PrefixTree, RunKey, SegmentId};

/// Chunks without a branch among the step's sequences, consecutive in one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Strip {
    /// The strip before it on the path, or [`NONE`].
    pub parent: u32,
    pub run: RunKey,
    /// First chunk in the run, and one past the last.
    pub begin: u32,
    pub end: u32,
    /// Chunks before it on the path.
    pub start_chunk: u32,
    /// The sequences that it covers, by their place in the depth-first order.
    pub seq_begin: u32,
    pub seq_end: u32,
}

/// Where a sequence of the batch ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct End {
    /// Its leaf segment in the tree.
    pub leaf: SegmentId,
    /// Its last strip.
    pub strip: u32,
}

/// A node: first the sequences of the batch, then the root above all trees, then segments.
#[derive(Debug, Clone, Copy)]
struct Node {
    parent: u32,
    next_sibling: u32,
    first_child: u32,
    last_child: u32,
    /// The last strip of the path down to here.
    strip: u32,
}

const LONE: Node =
    Node { parent: NONE, next_sibling: NONE, first_child: NONE, last_child: NONE, strip: NONE };

/// The forest of one step. Its buffers are used again for the next.
#[derive(Debug, Default)]
pub(super) struct Forest {
    /// Strips, parents before children.
    pub strips: Vec<Strip>,
    /// Sequences in depth-first order, by their place in the batch.
    pub order: Vec<u32>,
    /// For each sequence of the batch, where it ends.
    pub ends: Vec<End>,
    nodes: Vec<Node>,
    /// The segments among the nodes: that of node `n` is `windows[n - first_segment]`.
    windows: Vec<Window>,
    /// For each segment of the tree, the build that met it last and its node.
    met: Vec<(u64, u32)>,
    build: u64,
}

impl Forest {
    /// Spans the paths of the step's sequences. Siblings stand in the order in which the batch
    /// meets them, so that sequences that only grow keep their place.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`](crate::error::Error::UnknownSequence).
    pub fn build(&mut self, tree: &PrefixTree, queries: &[Query]) -> Result<()> {
        self.build += 1;
        self.met.resize(tree.segment_bound().max(self.met.len()), (0, NONE));
        self.windows.clear();
        self.ends.clear();
        for query in queries {
            self.ends.push(End { leaf: tree.leaf(query.sequence)?, strip: NONE });
        }
        self.nodes.clear();
        self.nodes.resize(self.ends.len() + 1, LONE);
        for sequence in 0..self.ends.len() {
            self.climb(tree, sequence as u32);
        }
        self.descend();
        Ok(())
    }

    fn root(&self) -> u32 {
        self.ends.len() as u32
    }

    /// Adds the segments from a sequence's leaf up to the first that is there already.
    fn climb(&mut self, tree: &PrefixTree, sequence: u32) {
        let mut below = sequence;
        let mut next = Some(self.ends[sequence as usize].leaf);
        while let Some(segment) = next {
            let met = &mut self.met[segment.index() as usize];
            if met.0 == self.build {
                let node = met.1;
                return self.attach(below, node);
            }
            let node = self.nodes.len() as u32;
            *met = (self.build, node);
            self.nodes.push(LONE);
            self.attach(below, node);
            let window = Window::of(tree, segment);
            self.windows.push(window);
            below = node;
            next = window.parent;
        }
        self.attach(below, self.root());
    }

    fn attach(&mut self, child: u32, parent: u32) {
        self.nodes[child as usize].parent = parent;
        let above = &mut self.nodes[parent as usize];
        let elder = std::mem::replace(&mut above.last_child, child);
        match elder {
            NONE => above.first_child = child,
            _ => self.nodes[elder as usize].next_sibling = child,
        }
    }

    /// Visits the nodes depth first, and lists sequences and strips.
    fn descend(&mut self) {
        self.order.clear();
        self.strips.clear();
        let root = self.root();
        let mut node = self.nodes[root as usize].first_child;
        while node != NONE && node != root {
            if node < root {
                self.order.push(node);
                let above = self.nodes[node as usize].parent;
                self.ends[node as usize].strip = self.nodes[above as usize].strip;
            } else {
                self.open(node);
                node = self.nodes[node as usize].first_child;
                continue;
            }
            while node != root && self.nodes[node as usize].next_sibling == NONE {
                node = self.nodes[node as usize].parent;
                self.close(node);
            }
            if node != root {
                node = self.nodes[node as usize].next_sibling;
            }
        }
    }

    /// Starts a strip for a segment, or lets the parent's go on where the two are one.
    fn open(&mut self, node: u32) {
        let root = self.root();
        let window = self.windows[(node - root - 1) as usize];
        let parent = self.nodes[node as usize].parent;
        let above = self.nodes[parent as usize];
        let is_only_child = above.first_child == above.last_child;
        let strip = match self.strips.get_mut(above.strip as usize) {
            Some(strip)
                if is_only_child && strip.run == window.run && strip.end == window.begin =>
            {
                strip.end = window.end;
                above.strip
            }
            _ => {
                self.strips.push(Strip {
                    parent: above.strip,
                    run: window.run,
                    begin: window.begin,
                    end: window.end,
                    start_chunk: window.start_chunk,
                    seq_begin: self.order.len() as u32,
                    seq_end: 0,
                });
                self.strips.len() as u32 - 1
            }
        };
        self.nodes[node as usize].strip = strip;
    }

    fn close(&mut self, node: u32) {
        if node == self.root() {
            return;
        }
        if let Some(strip) = self.strips.get_mut(self.nodes[node as usize].strip as usize) {
            strip.seq_end = self.order.len() as u32;
        }
    }
}
