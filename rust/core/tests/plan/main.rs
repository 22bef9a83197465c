//! Plans: the tables of a step, from a tree and from block tables, and their diffs.

mod block_tables;
mod history;
mod items;
mod support;
mod tree;
mod words;
