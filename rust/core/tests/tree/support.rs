//! What the tree's tests have in common.

use chunkcache::tree::{PrefixTree, SeqHandle, TreeConfig};

pub fn tree(capacity: usize, chunk_size: usize) -> PrefixTree {
    PrefixTree::new(TreeConfig::new(capacity, chunk_size)).unwrap()
}

/// Inserts a prompt and declares all of it as written.
pub fn insert_written(tree: &mut PrefixTree, tokens: &[u32]) -> SeqHandle {
    let inserted = tree.insert(tokens, b"").unwrap();
    let left = tokens.len() - inserted.num_computed_tokens;
    tree.commit(&[(inserted.seq, left as u32)]).unwrap();
    inserted.seq
}

pub fn numbers(count: u32) -> Vec<u32> {
    (0..count).collect()
}
