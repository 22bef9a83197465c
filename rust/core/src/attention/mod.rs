//! Two-phase attention on the CPU.
