//! Selectors for prefill: each turns q, k and v of a call into a mask.

pub mod a_shape;
pub mod ba_att;
pub mod bfla;
pub mod block_sparse;
pub mod delta;
pub mod flexprefill;
pub mod infinitehip;
pub mod meanpool;
pub(crate) mod method;
pub mod minference;
pub mod momo;
pub mod oracle_topk;
pub mod pbs;
pub mod streaming;
pub mod tri_shape;
pub mod vertical_slash;
pub mod xattention;

pub(crate) use method::{Knob, PrefillMethod, SHARES, TOKENS};
