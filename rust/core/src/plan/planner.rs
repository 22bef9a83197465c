//! Keeps the tables of a tree's steps up to date, writing only what changes.

mod items;

use super::arena::{IdWrite, PageArena};
use super::block_planner::ITEM_PAGE_SIZE;
use super::forest::{Forest, Strip};
use super::image::Image;
use super::items::{Cutter, Room};
use super::layout::{Limits, WorkLimits};
use super::rows::{Assigned, RowMap};
use super::source::{Query, Window};
use super::view::{NONE, SegmentRow, SequenceRow};
use crate::error::{Error, Result};
use crate::tree::{PrefixTree, RunKey, SegmentId, SeqHandle};

/// Tokens that a block of chunk ids covers at least, unless its chunks are few.
const BLOCK_TOKENS: u32 = 4096;

/// Chunk ids that a block has at least.
const MIN_BLOCK_LEN: u32 = 64;

/// Names a segment row from step to step: its run's slot and its first chunk in the run.
type SegmentKey = (u32, u32);

/// A sequence of the current step.
#[derive(Debug, Clone, Copy)]
struct Member {
    sequence: SeqHandle,
    /// Its row of `sequences`.
    row: u32,
    /// Its place in `order`.
    place: u32,
    /// Its leaf segment in the tree.
    leaf: SegmentId,
    /// The last row of its path.
    last_row: u32,
    /// Its leaf's run in the arena.
    held: u32,
    /// Chunks of its path that the tables hold.
    num_chunks: u32,
}

/// A leaf that has more chunks than the tables hold.
#[derive(Debug, Clone, Copy)]
struct Growth {
    member: u32,
    run: RunKey,
    begin: u32,
    end: u32,
}

/// The tables of one tree's steps.
///
/// The rows of a sequence and of a segment stay where they are from step to step. The ids of a
/// run lie in blocks, and a segment that crosses a border between blocks has one row for each.
#[derive(Debug)]
pub struct Planner {
    image: Image,
    page_size: u32,
    arena: PageArena,
    sequence_rows: RowMap<SeqHandle>,
    segment_rows: RowMap<SegmentKey>,
    /// The sequences of the current step, in the batch's order.
    members: Vec<Member>,
    /// The structure that the tables stand for.
    structure_version: Option<u64>,
    forest: Forest,
    /// Cuts the steps into work items, if the tables have them.
    cutter: Option<Box<Cutter>>,
    /// What the last step needed at least of the work items' sections.
    room: Room,
    scratch: Scratch,
}

/// Buffers that are used again from step to step.
#[derive(Debug, Default)]
struct Scratch {
    growths: Vec<Growth>,
    id_writes: Vec<IdWrite>,
    assigned: Vec<Assigned>,
    pieces: Vec<Piece>,
    /// For each strip, its last piece.
    last_piece: Vec<u32>,
    order: Vec<u32>,
    /// For each segment row, whether the order under construction has it.
    placed: Vec<bool>,
}

/// The part of a strip within one block: a segment row to be.
#[derive(Debug, Clone, Copy)]
struct Piece {
    strip: u32,
    parent: u32,
    begin: u32,
    end: u32,
    /// Its run in the arena.
    held: u32,
}

impl Planner {
    /// Tables for chunks of `page_size` tokens, with capacities that never change.
    ///
    /// `max_page_ids` is rounded down to whole blocks of [`Planner::block_len`] ids.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a `page_size` or a capacity of 0, for `max_page_ids` below
    /// one block, and for tables that would pass 2^32 words.
    pub fn new(page_size: u32, limits: Limits) -> Result<Self> {
        Self::over(Image::new(page_size, limits)?, None)
    }

    /// [`Planner::new`] with work items, which `cutter` cuts, in the same tables.
    ///
    /// # Errors
    /// As [`Planner::new`]; [`Error::InvalidConfig`] for a `page_size` that is no multiple of 16.
    pub fn with_items(
        page_size: u32,
        limits: Limits,
        work: WorkLimits,
        cutter: Cutter,
    ) -> Result<Self> {
        if !page_size.is_multiple_of(ITEM_PAGE_SIZE) {
            return Err(Error::invalid("page_size", page_size, "a multiple of 16"));
        }
        Self::over(Image::with_work(page_size, limits, work)?, Some(Box::new(cutter)))
    }

    fn over(image: Image, cutter: Option<Box<Cutter>>) -> Result<Self> {
        let (page_size, limits) = (image.view().page_size, image.layout().limits);
        let block_len = Self::block_len(page_size);
        if limits.max_page_ids < block_len {
            let allowed = format!("at least one block of {block_len}");
            return Err(Error::invalid("max_page_ids", limits.max_page_ids, allowed));
        }
        Ok(Self {
            image,
            page_size,
            arena: PageArena::new(block_len, limits.max_page_ids),
            sequence_rows: RowMap::new(limits.max_sequences),
            segment_rows: RowMap::new(limits.max_segments),
            members: Vec::new(),
            structure_version: None,
            forest: Forest::default(),
            cutter,
            room: Room::default(),
            scratch: Scratch::default(),
        })
    }

    /// Chunk ids of one block: at least 64, and enough for 4,096 tokens.
    pub fn block_len(page_size: u32) -> u32 {
        BLOCK_TOKENS.checked_div(page_size).unwrap_or(0).max(MIN_BLOCK_LEN)
    }

    /// Capacities for the steps of a pool of `num_chunks` chunks of `page_size` tokens.
    pub fn default_limits(page_size: u32, num_chunks: u32) -> Limits {
        let max_sequences = num_chunks.clamp(64, 1024);
        let block_len = Self::block_len(page_size);
        // Each sequence may leave the end of one block of its own unused, and of one shared.
        let unused = block_len.saturating_mul(2 * max_sequences.min(num_chunks.max(1)));
        let max_page_ids = num_chunks.saturating_add(unused).next_multiple_of(block_len);
        Limits { max_sequences, max_segments: num_chunks.clamp(64, 1 << 16), max_page_ids }
    }

    /// Tokens per chunk.
    pub fn page_size(&self) -> u32 {
        self.page_size
    }

    /// The tables.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Makes the tables of the next step, whose sequences are distinct.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::InvalidConfig`] if the step passes a capacity or
    /// needs more tokens than a sequence has chunks for. The tables are unchanged then.
    pub(super) fn update(
        &mut self,
        tree: &PrefixTree,
        queries: &[Query],
        num_qo_rows: u32,
    ) -> Result<()> {
        let same_batch = self.structure_version == Some(tree.structure_version())
            && self.members.len() == queries.len()
            && self.members.iter().zip(queries).all(|(old, new)| old.sequence == new.sequence);
        let mut keeps_items = same_batch;
        if same_batch {
            let num_rows = self.find_growths(tree, queries)?;
            keeps_items = num_rows == 0 && self.has_same_rows(queries, num_qo_rows);
            if !keeps_items {
                self.check_room_when_grown(queries, num_qo_rows)?;
            }
            let rows = self.members.iter().map(|member| member.row);
            self.image.begin_step(rows.zip(queries.iter().map(|query| query.kv_len)));
            self.grow(tree);
        } else {
            self.find_structure(tree, queries)?;
            self.check_room_of_structure(queries, num_qo_rows)?;
            let row =
                |query: &Query| Some((self.sequence_rows.get(&query.sequence)?, query.kv_len));
            self.image.begin_step(queries.iter().filter_map(row));
            self.restructure(tree, queries);
            self.structure_version = Some(tree.structure_version());
        }
        for (member, query) in self.members.iter().zip(queries) {
            let &Query { qo_begin, qo_len, kv_len, num_cached_rows, .. } = query;
            let leaf = member.last_row;
            let row = SequenceRow { leaf, qo_begin, qo_len, kv_len, num_cached_rows };
            self.image.set_sequence(member.row, row);
        }
        self.image.set_num_qo_rows(num_qo_rows);
        self.update_items(keeps_items);
        Ok(())
    }

    /// Lists the leaves that grew, and checks that there is room for what they gained. Returns how
    /// many segment rows they need.
    fn find_growths(&mut self, tree: &PrefixTree, queries: &[Query]) -> Result<usize> {
        let growths = &mut self.scratch.growths;
        growths.clear();
        let (mut num_blocks, mut num_rows) = (0, 0);
        for (index, (member, query)) in self.members.iter().zip(queries).enumerate() {
            let needed = query.kv_len.div_ceil(self.page_size);
            if needed <= member.num_chunks {
                continue;
            }
            let missing = || short_path(index, query.kv_len, member.num_chunks, self.page_size);
            let window = Window::of(tree, member.leaf);
            let end = window.end;
            let begin = window.begin + (member.num_chunks - window.start_chunk);
            if window.end_chunk() < needed {
                return Err(missing());
            }
            num_blocks += self.arena.lacking(member.held, end);
            let block = |chunk: u32| (chunk - 1) / self.arena.block_len();
            num_rows += (block(end) - block(begin)) as usize;
            growths.push(Growth { member: index as u32, run: window.run, begin, end });
        }
        self.check_room(num_blocks, self.arena.num_spare(), num_rows)?;
        Ok(num_rows)
    }

    fn check_room(&self, num_blocks: usize, spare_blocks: usize, num_rows: usize) -> Result<()> {
        if num_blocks > spare_blocks {
            let block_len = self.arena.block_len() as usize;
            let ids = |blocks: usize| blocks * block_len;
            let given = format!("{} more chunk ids", ids(num_blocks));
            let allowed = format!(
                "at most max_page_ids = {}, of which {} are to spare (in blocks of {block_len})",
                ids(self.arena.num_blocks()),
                ids(spare_blocks)
            );
            return Err(Error::invalid("batch", given, allowed));
        }
        if num_rows > self.segment_rows.num_free() {
            let (max, free) = (self.segment_rows.capacity(), self.segment_rows.num_free());
            let allowed = format!("at most max_segments = {max}, of which {free} are free");
            return Err(Error::invalid("batch", format!("{num_rows} more segment rows"), allowed));
        }
        Ok(())
    }

    fn grow(&mut self, tree: &PrefixTree) {
        let Scratch { growths, id_writes, .. } = &mut self.scratch;
        id_writes.clear();
        for &Growth { member, run, begin, end } in growths.iter() {
            let held = self.members[member as usize].held;
            self.arena.grow(held, run, begin, end, id_writes);
        }
        self.write_ids(tree);
        for &Growth { member, run, begin, end } in &self.scratch.growths {
            let member = &mut self.members[member as usize];
            let block_len = self.arena.block_len();
            let mut begin = begin;
            while begin < end {
                let piece_end = end.min((begin / block_len + 1) * block_len);
                let added = piece_end - begin;
                if begin % block_len == 0 {
                    let row = self.segment_rows.add((run.index, begin));
                    let num_segments = self.image.view().segment_order.len();
                    self.image.set_segment(
                        row,
                        SegmentRow {
                            parent: member.last_row,
                            seq_begin: member.place,
                            seq_end: member.place + 1,
                            start_pos: member.num_chunks * self.page_size,
                            num_pages: added,
                            ids_begin: self.arena.position(member.held, begin),
                        },
                    );
                    self.image.set_segment_order(num_segments, &[row]);
                    member.last_row = row;
                } else {
                    let mut row = self.image.segment(member.last_row);
                    row.num_pages += added;
                    self.image.set_segment(member.last_row, row);
                }
                member.num_chunks += added;
                begin = piece_end;
            }
        }
    }

    fn write_ids(&mut self, tree: &PrefixTree) {
        for write in &self.scratch.id_writes {
            let ids = &tree.run_chunks(write.run)[write.begin as usize..write.end as usize];
            self.image.set_page_ids(write.at, ids);
        }
    }

    /// Finds the strips and pieces of a new step, and checks that there is room for them.
    fn find_structure(&mut self, tree: &PrefixTree, queries: &[Query]) -> Result<()> {
        let max_sequences = self.sequence_rows.capacity();
        if queries.len() > max_sequences {
            let given = format!("{} sequences", queries.len());
            let allowed = format!("at most max_sequences = {max_sequences}");
            return Err(Error::invalid("batch", given, allowed));
        }
        self.forest.build(tree, queries)?;
        for (index, (query, end)) in queries.iter().zip(&self.forest.ends).enumerate() {
            let strip = self.forest.strips.get(end.strip as usize);
            let held = strip.map_or(0, |strip| strip.start_chunk + (strip.end - strip.begin));
            if query.kv_len.div_ceil(self.page_size) > held {
                return Err(short_path(index, query.kv_len, held, self.page_size));
            }
        }
        self.arena.begin_attempt();
        let Scratch { pieces, last_piece, .. } = &mut self.scratch;
        pieces.clear();
        last_piece.clear();
        for (index, strip) in self.forest.strips.iter().enumerate() {
            let held = self.arena.want(strip.run, strip.end);
            let mut parent = last_piece.get(strip.parent as usize).copied().unwrap_or(NONE);
            let mut begin = strip.begin;
            while begin < strip.end {
                let border = (begin / self.arena.block_len() + 1) * self.arena.block_len();
                let end = border.min(strip.end);
                pieces.push(Piece { strip: index as u32, parent, begin, end, held });
                parent = pieces.len() as u32 - 1;
                begin = end;
            }
            last_piece.push(parent);
        }
        self.check_total()
    }

    fn check_total(&self) -> Result<()> {
        let (max_blocks, block_len) = (self.arena.num_blocks(), self.arena.block_len() as usize);
        let (num_blocks, num_rows) = (self.arena.wanted_blocks(), self.scratch.pieces.len());
        if num_blocks > max_blocks {
            let given = format!("{} chunk ids in blocks of {block_len}", num_blocks * block_len);
            let allowed = format!("at most max_page_ids = {}", max_blocks * block_len);
            return Err(Error::invalid("batch", given, allowed));
        }
        let max_rows = self.segment_rows.capacity();
        if num_rows > max_rows {
            let allowed = format!("at most max_segments = {max_rows}");
            return Err(Error::invalid("batch", format!("{num_rows} segment rows"), allowed));
        }
        Ok(())
    }

    fn restructure(&mut self, tree: &PrefixTree, queries: &[Query]) {
        self.scratch.id_writes.clear();
        self.arena.take_wanted(&mut self.scratch.id_writes);
        self.write_ids(tree);
        self.place_segments();
        self.place_sequences(queries);
    }

    /// Gives the pieces their rows and brings `segment_order` up to date.
    fn place_segments(&mut self) {
        let Scratch { pieces, assigned, .. } = &mut self.scratch;
        let strips = &self.forest.strips;
        let key = |piece: &Piece| (strips[piece.strip as usize].run.index, piece.begin);
        self.segment_rows.assign(pieces.iter().map(key), assigned);
        for (piece, given) in pieces.iter().zip(assigned.iter()) {
            let strip: &Strip = &strips[piece.strip as usize];
            let parent = assigned.get(piece.parent as usize).map_or(NONE, |parent| parent.row);
            let start_chunk = strip.start_chunk + (piece.begin - strip.begin);
            self.image.set_segment(
                given.row,
                SegmentRow {
                    parent,
                    seq_begin: strip.seq_begin,
                    seq_end: strip.seq_end,
                    start_pos: start_chunk * self.page_size,
                    num_pages: piece.end - piece.begin,
                    ids_begin: self.arena.position(piece.held, piece.begin),
                },
            );
        }
        self.order_segments();
    }

    /// Keeps the order of the rows that stay and appends the new ones, so that a leaf that gains
    /// its first chunk costs one word; falls back to the depth-first order where that would put
    /// a child before its parent.
    fn order_segments(&mut self) {
        let Scratch { assigned, order, placed, .. } = &mut self.scratch;
        let view = self.image.view();
        placed.resize(self.segment_rows.capacity(), false);
        for kept in assigned.iter().filter(|given| !given.is_new) {
            placed[kept.row as usize] = true;
        }
        order.clear();
        order.extend(view.segment_order.iter().filter(|&&row| placed[row as usize]));
        order.extend(assigned.iter().filter(|given| given.is_new).map(|given| given.row));
        assigned.iter().for_each(|given| placed[given.row as usize] = false);
        let parents_first = order.iter().all(|&row| {
            placed[row as usize] = true;
            placed.get(view.segments[row as usize].parent as usize).copied().unwrap_or(true)
        });
        assigned.iter().for_each(|given| placed[given.row as usize] = false);
        if !parents_first {
            order.clear();
            order.extend(assigned.iter().map(|given| given.row));
        }
        self.image.set_segment_order(0, order);
    }

    fn place_sequences(&mut self, queries: &[Query]) {
        let Scratch { assigned, pieces, last_piece, order, .. } = &mut self.scratch;
        let last_row = |&piece: &u32| (assigned[piece as usize].row, pieces[piece as usize].held);
        let lasts: Vec<(u32, u32)> = last_piece.iter().map(last_row).collect();
        self.sequence_rows.assign(queries.iter().map(|query| query.sequence), assigned);
        self.members.clear();
        for ((query, end), given) in queries.iter().zip(&self.forest.ends).zip(assigned.iter()) {
            let strip = self.forest.strips.get(end.strip as usize);
            let (last_row, held) = lasts.get(end.strip as usize).copied().unwrap_or((NONE, NONE));
            self.members.push(Member {
                sequence: query.sequence,
                row: given.row,
                place: 0,
                leaf: end.leaf,
                last_row,
                held,
                num_chunks: strip.map_or(0, |strip| strip.start_chunk + strip.end - strip.begin),
            });
        }
        order.clear();
        for (place, &index) in self.forest.order.iter().enumerate() {
            let member = &mut self.members[index as usize];
            member.place = place as u32;
            order.push(member.row);
        }
        self.image.set_order(order);
    }
}

fn short_path(index: usize, kv_len: u32, num_chunks: u32, page_size: u32) -> Error {
    let held = u64::from(num_chunks) * u64::from(page_size);
    Error::invalid(
        format!("batch[{index}]"),
        format!("a step up to token {kv_len}"),
        format!("at most the {held} tokens that the sequence has chunks for"),
    )
}
