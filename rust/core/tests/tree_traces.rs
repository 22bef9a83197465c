//! Real request traces: what is matched agrees with figures from other implementations.
//!
//! The traces are not part of this repository. They are looked for in `CHUNKCACHE_SHARED_DATA`, or
//! in `shared/data` beside the checkout; without them the tests pass with a message.

use std::fs;
use std::path::PathBuf;

use chunkcache::tree::{PrefixTree, TreeConfig};
use serde_json::Value;

/// Token slots of a Mooncake block.
const BLOCK: usize = 512;

fn trace(name: &str) -> Option<String> {
    let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data");
    let folder =
        std::env::var_os("CHUNKCACHE_SHARED_DATA").map_or_else(|| beside.into(), PathBuf::from);
    let path = folder.join("traces").join(name);
    let text = fs::read_to_string(&path);
    if let Err(error) = &text {
        println!("skipped: {}: {error}", path.display());
    }
    text.ok()
}

fn numbers(value: &Value) -> Vec<u32> {
    let numbers = value.as_array().expect("a list").iter();
    numbers.map(|number| u32::try_from(number.as_u64().unwrap()).unwrap()).collect()
}

fn lines(text: &str) -> impl Iterator<Item = Value> + '_ {
    text.lines().map(|line| serde_json::from_str(line).unwrap())
}

/// Inserts a prompt, writes all of it and removes it. Gives the number of matched tokens.
fn visit(tree: &mut PrefixTree, tokens: &[u32]) -> usize {
    let inserted = tree.insert(tokens, b"").unwrap();
    let left = tokens.len() - inserted.num_computed_tokens;
    tree.commit(&[(inserted.seq, left as u32)]).unwrap();
    tree.remove(inserted.seq).unwrap();
    inserted.num_matched_tokens
}

fn assert_agent_trace_matches(page_size: usize) {
    let golden = format!("golden_match_miniswe_p{page_size}.json");
    let (Some(golden), Some(requests)) =
        (trace(&golden), trace("agent_miniswe_smollm2_tokens.jsonl"))
    else {
        return;
    };
    let golden: Value = serde_json::from_str(&golden).unwrap();
    let expected = numbers(&golden["matched"]);
    let mut tree = PrefixTree::new(TreeConfig::new(1 << 20, page_size)).unwrap();
    let mut matched = Vec::new();
    for request in lines(&requests) {
        let prompt = numbers(&request["input_ids"]);
        matched.push(tree.match_prefix(&prompt, b"").num_filled as u32);
        // The recorded cache keeps the prompt and all of the output but the last token, whose K/V
        // was never computed.
        let output = numbers(&request["output_ids"]);
        let mut tokens = prompt;
        tokens.extend(&output[..output.len().saturating_sub(1)]);
        visit(&mut tree, &tokens);
    }
    assert_eq!(matched, expected);
    tree.check_invariants().unwrap();
}

#[test]
fn the_agent_trace_matches_as_recorded_with_chunks_of_16() {
    assert_agent_trace_matches(16);
}

#[test]
fn the_agent_trace_matches_as_recorded_with_chunks_of_64() {
    assert_agent_trace_matches(64);
}

/// The hit ratios of a trace of blocks: of tokens, of blocks, and the mean of the requests' ratios
/// of blocks.
struct HitRatios {
    tokens: f64,
    blocks: f64,
    mean: f64,
}

fn replay(text: &str, capacity: usize) -> HitRatios {
    let mut tree = PrefixTree::new(TreeConfig::new(capacity, 1)).unwrap();
    let (mut tokens, mut hit_tokens, mut mean, mut count) = (0, 0, 0.0, 0);
    for request in lines(text) {
        let blocks = numbers(&request["hash_ids"]);
        let length = request["input_length"].as_u64().unwrap() as usize;
        let matched = visit(&mut tree, &blocks);
        tokens += length;
        // The last block may be partial.
        hit_tokens += (matched * BLOCK).min(length);
        mean += matched as f64 / blocks.len() as f64;
        count += 1;
    }
    let stats = tree.stats();
    HitRatios {
        tokens: hit_tokens as f64 / tokens as f64,
        blocks: stats.prefix_cache_hits as f64 / stats.prefix_cache_queries as f64,
        mean: mean / f64::from(count),
    }
}

/// In per cent with two digits, as the figures are stated.
fn per_cent(ratio: f64) -> String {
    format!("{:.2}", ratio * 100.0)
}

#[test]
fn the_conversation_trace_hits_as_stated_without_a_limit() {
    let Some(text) = trace("mooncake_conversation_trace.jsonl") else { return };
    let ratios = replay(&text, 1 << 20);
    assert_eq!([per_cent(ratios.tokens), per_cent(ratios.blocks)], ["37.36", "36.64"]);
    assert!((ratios.mean - 0.384_258_087_46).abs() < 1e-11, "{}", ratios.mean);
}

#[test]
fn the_synthetic_trace_hits_as_stated_without_a_limit() {
    let Some(text) = trace("mooncake_synthetic_trace.jsonl") else { return };
    let ratios = replay(&text, 1 << 20);
    assert_eq!([per_cent(ratios.tokens), per_cent(ratios.blocks)], ["65.12", "63.96"]);
    assert!((ratios.mean - 0.423_235_323_78).abs() < 1e-11, "{}", ratios.mean);
}

fn assert_lru_hits(name: &str, stated: [f64; 4]) {
    let Some(text) = trace(name) else { return };
    for (capacity, stated) in [1_000, 5_000, 20_000, 100_000].into_iter().zip(stated) {
        let found = replay(&text, capacity).tokens * 100.0;
        assert!(found >= stated - 0.5, "{capacity} blocks: {found} %, stated {stated} %");
        println!("{name}, {capacity} blocks: {found:.2} %, stated {stated} %");
    }
}

#[test]
fn the_conversation_trace_hits_as_stated_with_a_limit() {
    assert_lru_hits("mooncake_conversation_trace.jsonl", [4.5, 11.4, 29.4, 37.1]);
}

#[test]
fn the_synthetic_trace_hits_as_stated_with_a_limit() {
    assert_lru_hits("mooncake_synthetic_trace.jsonl", [8.6, 28.5, 58.2, 65.1]);
}
