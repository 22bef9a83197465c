//! How long the device takes for a list of items.

/// Items of equal cost that follow each other in the list.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Batch {
    pub cost: f32,
    pub count: u32,
    /// They end only once all items before them have, but for those that wait as they do.
    pub waits: bool,
}

/// The loads of the blocks, kept as a heap with the least load on top. Its memory is used again.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    loads: Vec<f32>,
}

impl Blocks {
    /// The longest block when items go, in their order, to the block that is free first.
    pub fn makespan(&mut self, batches: impl Iterator<Item = Batch>, num_blocks: u32) -> f32 {
        let loads = &mut self.loads;
        loads.clear();
        let mut ready = None;
        for Batch { cost, count, waits } in batches {
            let least = match waits {
                true => *ready.get_or_insert_with(|| longest(loads)),
                false => 0.0,
            };
            let free = (num_blocks as usize - loads.len()).min(count as usize);
            if free > 0 {
                loads.resize(loads.len() + free, cost.max(least));
                if loads.len() == num_blocks as usize {
                    // Ascending order is a heap.
                    loads.sort_unstable_by(f32::total_cmp);
                }
            }
            for _ in free..count as usize {
                add_to_least(loads, cost, least);
            }
        }
        longest(loads)
    }
}

fn longest(loads: &[f32]) -> f32 {
    loads.iter().copied().fold(0.0, f32::max)
}

/// Adds to the load on top, up to `least` at least, and lets it sink.
fn add_to_least(loads: &mut [f32], cost: f32, least: f32) {
    let load = (loads[0] + cost).max(least);
    let mut at = 0;
    loop {
        let mut child = 2 * at + 1;
        if child >= loads.len() {
            break;
        }
        if child + 1 < loads.len() && loads[child + 1] < loads[child] {
            child += 1;
        }
        if load <= loads[child] {
            break;
        }
        loads[at] = loads[child];
        at = child;
    }
    loads[at] = load;
}

#[cfg(test)]
mod tests {
    use super::{Batch, Blocks};

    fn span(costs: &[f32], num_blocks: u32) -> f32 {
        let batches = costs.iter().map(|&cost| Batch { cost, count: 1, waits: false });
        Blocks::default().makespan(batches, num_blocks)
    }

    #[test]
    fn items_go_to_the_block_that_is_free_first() {
        // Blocks end at 5 and 4, then at 5 and 7, then at 7 and 7.
        assert_eq!(span(&[5.0, 4.0, 3.0, 2.0], 2), 7.0);
    }

    #[test]
    fn fewer_items_than_blocks_take_the_longest() {
        assert_eq!(span(&[2.0, 3.0], 4), 3.0);
    }

    #[test]
    fn equal_items_count_as_one_by_one() {
        let batch = Batch { cost: 2.0, count: 7, waits: false };
        assert_eq!(Blocks::default().makespan([batch].into_iter(), 3), span(&[2.0; 7], 3));
    }

    #[test]
    fn items_that_wait_end_after_all_before_them() {
        let item = |cost, waits| Batch { cost, count: 1, waits };
        // Blocks end at 9 and 2; the third item ends at 9 and keeps its block from the fourth.
        let batches = [item(9.0, false), item(2.0, false), item(1.0, true), item(3.0, true)];
        assert_eq!(Blocks::default().makespan(batches.into_iter(), 2), 12.0);
    }

    #[test]
    fn no_items_take_no_time() {
        assert_eq!(span(&[], 3), 0.0);
    }
}
