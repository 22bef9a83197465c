//! Trees of sequences, written down by hand, and their tables.

use chunkcache::plan::{NONE, PlanView, SegmentRow, SequenceRow};

/// A sequence of a tree.
#[derive(Debug, Clone)]
pub struct Sequence {
    /// Pages on its path, root first.
    pub pages: Vec<u32>,
    /// Keys, this step's included.
    pub kv_len: u32,
    /// Query tokens.
    pub qo_len: u32,
    /// First query row.
    pub qo_begin: u32,
}

/// A tree: sequences in depth-first order, and segments as runs of pages over ranges of them.
#[derive(Debug, Clone)]
pub struct Tree {
    pub page_size: u32,
    pub sequences: Vec<Sequence>,
    /// Query rows, padding included.
    pub num_qo_rows: u32,
    pub num_pages: u32,
    segments: Vec<SegmentRow>,
    page_ids: Vec<u32>,
    leaves: Vec<u32>,
}

/// The rows of a tree's plan.
#[derive(Debug, Clone)]
pub struct Tables {
    page_size: u32,
    num_qo_rows: u32,
    pub order: Vec<u32>,
    pub sequences: Vec<SequenceRow>,
    pub segment_order: Vec<u32>,
    pub segments: Vec<SegmentRow>,
    pub page_ids: Vec<u32>,
}

impl Tables {
    pub fn view(&self) -> PlanView<'_> {
        PlanView {
            page_size: self.page_size,
            num_qo_rows: self.num_qo_rows,
            order: &self.order,
            sequences: &self.sequences,
            segment_order: &self.segment_order,
            segments: &self.segments,
            page_ids: &self.page_ids,
        }
    }
}

impl Tree {
    /// A tree without sequences.
    pub fn new(page_size: u32) -> Self {
        Self {
            page_size,
            sequences: Vec::new(),
            num_qo_rows: 0,
            num_pages: 0,
            segments: Vec::new(),
            page_ids: Vec::new(),
            leaves: Vec::new(),
        }
    }

    /// Adds a segment of `num_pages` pages below `parent` (`None`: a root); its number.
    pub fn segment(&mut self, parent: Option<u32>, num_pages: u32) -> u32 {
        let start_pos = parent.map_or(0, |parent| {
            let row = &self.segments[parent as usize];
            row.start_pos + row.num_pages * self.page_size
        });
        let place = self.sequences.len() as u32;
        self.segments.push(SegmentRow {
            parent: parent.unwrap_or(NONE),
            seq_begin: place,
            seq_end: place,
            start_pos,
            num_pages,
            ids_begin: self.page_ids.len() as u32,
        });
        // Ids that are neither consecutive nor ascending along a path.
        let first = self.num_pages;
        self.page_ids.extend((0..num_pages).rev().map(|page| first + page));
        self.num_pages += num_pages;
        self.segments.len() as u32 - 1
    }

    /// Adds a sequence below `leaf` with the last `qo_len` of `kv_len` tokens as queries.
    pub fn sequence(&mut self, leaf: Option<u32>, kv_len: u32, qo_len: u32) {
        let place = self.sequences.len() as u32;
        let mut pages = Vec::new();
        let mut at = leaf;
        while let Some(segment) = at {
            let row = &mut self.segments[segment as usize];
            assert_eq!(row.seq_end.max(place), place, "sequences are added in depth-first order");
            row.seq_end = place + 1;
            let ids = row.ids_begin as usize..(row.ids_begin + row.num_pages) as usize;
            pages.splice(0..0, self.page_ids[ids].iter().copied());
            at = (row.parent != NONE).then_some(row.parent);
        }
        self.leaves.push(leaf.unwrap_or(NONE));
        let qo_begin = self.num_qo_rows;
        self.sequences.push(Sequence { pages, kv_len, qo_len, qo_begin });
        self.num_qo_rows += qo_len;
    }

    /// Adds a private segment below `parent` and its sequence.
    pub fn leaf(&mut self, parent: Option<u32>, private_keys: u32, qo_len: u32) {
        let above = parent.map_or(0, |parent| {
            let row = &self.segments[parent as usize];
            row.start_pos + row.num_pages * self.page_size
        });
        let leaf = if private_keys > 0 {
            Some(self.segment(parent, private_keys.div_ceil(self.page_size)))
        } else {
            parent
        };
        self.sequence(leaf, above + private_keys, qo_len);
    }

    /// Adds query rows that belong to no sequence.
    pub fn padding(&mut self, rows: u32) {
        self.num_qo_rows += rows;
    }

    /// The tables. Sequence rows and segment rows are in an order of their own, with unused rows
    /// between them, as those of a plan that has seen sequences come and go.
    pub fn tables(&self) -> Tables {
        let unused = SequenceRow { leaf: 7, qo_begin: 9, qo_len: 9, kv_len: 9, num_cached_rows: 0 };
        let count = self.sequences.len();
        let mut sequences = vec![unused; 2 * count];
        let order = (0..count).map(|i| (2 * (count - 1 - i) + 1) as u32).collect::<Vec<_>>();
        for (place, sequence) in self.sequences.iter().enumerate() {
            sequences[order[place] as usize] = SequenceRow {
                leaf: self.leaves[place],
                qo_begin: sequence.qo_begin,
                qo_len: sequence.qo_len,
                kv_len: sequence.kv_len,
                num_cached_rows: 0,
            };
        }
        Tables {
            page_size: self.page_size,
            num_qo_rows: self.num_qo_rows,
            order,
            sequences,
            segment_order: (0..self.segments.len() as u32).collect(),
            segments: self.segments.clone(),
            page_ids: self.page_ids.clone(),
        }
    }
}

/// Two roots: one of three levels with ragged leaves, one with a single sequence; padding rows.
pub fn forest(page_size: u32) -> Tree {
    let mut tree = Tree::new(page_size);
    let root = tree.segment(None, 3);
    let left = tree.segment(Some(root), 2);
    tree.leaf(Some(left), 1, 1);
    tree.padding(1);
    tree.leaf(Some(left), page_size + 5, 1);
    tree.leaf(Some(root), 0, 1);
    let right = tree.segment(Some(root), 1);
    tree.leaf(Some(right), 2 * page_size, 1);
    tree.leaf(Some(right), 3, 3);
    tree.leaf(None, 37, 1);
    tree.padding(2);
    tree
}
