//! Imports that the file of every selector needs.

pub(crate) use sieve_core::{BlockScores, BlockSelection, CallShape, KeepBlocks, KeptRows, Tiles};

pub(crate) use crate::call::{Call, Reads};
pub(crate) use crate::error::SelectError;
pub(crate) use crate::gqa::{self, GqaPolicy};
pub(crate) use crate::mask::Selected;
pub(crate) use crate::prefill::{Knob, PrefillMethod, SHARES, TOKENS};
pub(crate) use crate::range::Rules;
pub(crate) use crate::settings::{choices, settings};
