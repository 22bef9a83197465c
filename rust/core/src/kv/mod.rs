//! Host storage of K and V.
