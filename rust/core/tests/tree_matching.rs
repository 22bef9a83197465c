//! Without eviction, exactly the longest common prefix in full chunks is matched.

use std::collections::{HashMap, HashSet};

use chunkcache::tree::{PrefixTree, SeqHandle, TreeConfig};
use proptest::prelude::*;
use proptest::sample::Index;

#[derive(Debug, Clone)]
enum Op {
    Insert(Vec<u32>),
    Remove(Index),
    Write(Index, Index),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => prop::collection::vec(0_u32..2, 1..20).prop_map(Op::Insert),
        2 => any::<Index>().prop_map(Op::Remove),
        3 => (any::<Index>(), any::<Index>()).prop_map(|(seq, len)| Op::Write(seq, len)),
    ]
}

/// The prefixes of `tokens` in full chunks.
fn prefixes(tokens: &[u32], chunk_size: usize) -> impl Iterator<Item = Vec<u32>> + '_ {
    (1..=tokens.len() / chunk_size).map(move |chunks| tokens[..chunks * chunk_size].to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_longest_cached_prefix_is_matched(
        ops in prop::collection::vec(op(), 1..60),
        chunk_size in 1_usize..5,
    ) {
        let mut tree = PrefixTree::new(TreeConfig::new(10_000, chunk_size)).unwrap();
        let mut live: Vec<(SeqHandle, Vec<u32>)> = Vec::new();
        let mut written: HashSet<Vec<u32>> = HashSet::new();
        for op in ops {
            match op {
                Op::Insert(tokens) => {
                    let mut held: HashMap<Vec<u32>, usize> = HashMap::new();
                    for (_, other) in &live {
                        for prefix in prefixes(other, chunk_size) {
                            *held.entry(prefix).or_default() += 1;
                        }
                    }
                    let is_cached =
                        |prefix: &Vec<u32>| held.contains_key(prefix) || written.contains(prefix);
                    let expected = prefixes(&tokens, chunk_size)
                        .take_while(is_cached)
                        .last()
                        .map_or(0, |prefix| prefix.len());
                    let inserted = tree.insert(&tokens, b"").unwrap();
                    prop_assert_eq!(inserted.num_matched_tokens, expected);
                    live.push((inserted.seq, tokens));
                }
                Op::Remove(index) if !live.is_empty() => {
                    let (seq, _) = live.swap_remove(index.index(live.len()));
                    tree.remove(seq).unwrap();
                }
                Op::Write(index, len) if !live.is_empty() => {
                    let (seq, tokens) = &live[index.index(live.len())];
                    let info = tree.sequence(*seq).unwrap();
                    if !info.is_ready {
                        continue;
                    }
                    let left = tokens.len() - info.num_computed_tokens;
                    tree.commit(&[(*seq, 1 + len.index(left) as u32)]).unwrap();
                    let filled = tree.match_prefix(tokens, b"").num_filled;
                    written.extend(prefixes(&tokens[..filled], chunk_size));
                }
                _ => {}
            }
            prop_assert_eq!(tree.check_invariants(), Ok(()));
        }
    }
}
