//! Tests of all methods. `cargo test bfla` runs the tests of one method: its own tests are named `bfla_…`, the checks
//! of all methods run as `bfla::…`.

/// Declares tests that call the checks of a module with some texts.
macro_rules! checks {
    ($($texts:expr => $module:ident: $($check:ident)+;)+) => {$($(
        #[test]
        fn $check() {
            crate::tests::$module::$check(&$texts);
        }
    )+)+};
}

mod chunks;
mod corrected;
mod decode;
mod extremes;
mod forms;
mod golden;
mod methods;
mod permuted;
mod recall;
mod settings;
mod trained;

use crate::selector::{Selector, all_methods};
use crate::test_data::TestCall;

/// The texts among `texts` that select one method.
fn of<'t>(texts: &[&'t str], method: &str) -> Vec<&'t str> {
    let texts = texts.iter().copied();
    let mine: Vec<&str> = texts.filter(|text| text.split(':').next() == Some(method)).collect();
    assert!(!mine.is_empty(), "{method} has no settings here");
    mine
}

/// Every check that holds for all prefill methods, as `METHOD::CHECK`.
macro_rules! prefill_methods {
    (prefill { $($phase:ident $method:ident in $module:ident::$kind:ident($settings:ident $($row:tt)*);)+ }
        $($decode:tt)*) => {
        /// Every prefill method in settings small enough for a few hundred tokens.
        pub(super) const SMALL: &[&[&str]] =
            &[$(crate::prefill::$module::$settings::SMALL),+];

        $(mod $method {
            use super::of;
            use crate::prefill::$module::$settings as Settings;

            const NAME: &str = stringify!($method);

            checks! {
                of(Settings::SMALL, NAME) => forms:
                    equals_dense_attention_under_its_mask
                    is_sparse_and_its_density_is_that_of_the_expanded_mask
                    the_list_fixed_later_tokens_change_nothing_before
                    order_of_heads_and_requests_changes_nothing_but_rounding
                    threads_do_not_change_a_bit
                    batches_of_different_lengths_with_an_empty_document_between;
                of(Settings::SMALL, NAME) => extremes:
                    equal_scores_zeros_and_a_huge_key
                    one_finite_score_takes_everything
                    a_nan_makes_its_head_dense_and_leaves_the_others_alone;
                of(Settings::EVERYTHING, NAME) => forms: everything_kept_equals_dense;
                of(Settings::EVERYTHING, NAME) => chunks: everything_kept_in_misaligned_chunks_equals_dense;
                NAME => chunks: chunks_agree_as_far_as_promised;
            }
        })+
    };
}

all_methods! { prefill_methods }

#[test]
fn every_prefill_method_is_checked() {
    let tested: std::collections::BTreeSet<&str> =
        SMALL.concat().iter().filter_map(|text| text.split(':').next()).collect();
    let known: std::collections::BTreeSet<&str> = crate::names_of(crate::Phase::Prefill).into_iter().collect();
    assert_eq!(tested, known);
}

/// A temporary file with this text.
pub(super) fn file(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), text).expect("written");
    file
}

/// A selector from its text.
pub(crate) fn parsed(text: &str) -> Selector {
    Selector::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// A selector from its text, without the shortcut for short calls.
pub(super) fn selector(text: &str) -> Selector {
    let mut selector = parsed(text);
    selector.common.min_prefill_tokens = 0;
    selector
}

/// Selection and attention of a whole call by the selector of `text`.
pub(super) fn prefill(text: &str, call: &crate::Call<'_>) -> crate::Prefill {
    let done = selector(text).prefill(call);
    done.unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Attention under a valid mask.
pub(super) fn attend(data: &TestCall, chosen: &crate::Selected) -> crate::AttentionOutput {
    crate::block_sparse_attention(&data.call(), chosen).expect("valid")
}

/// The mask of a method on a whole call.
pub(super) fn select(text: &str, data: &TestCall) -> crate::Selected {
    select_of(text, &data.call())
}

/// The mask of a method on a call.
pub(super) fn select_of(text: &str, call: &crate::Call<'_>) -> crate::Selected {
    let chosen = selector(text).select(call).unwrap_or_else(|error| panic!("{text}: {error}"));
    chosen.check(call).unwrap_or_else(|error| panic!("{text}: {error}"));
    chosen
}
