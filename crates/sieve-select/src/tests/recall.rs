//! No method has more recall than the oracle at equal density, among methods that choose among the same blocks.

use super::{attend, select, selector};
use crate::test_data::TestCall;
use crate::{Selected, dense_attention, density, oracle_dense, recall};
use sieve_testing::Random;

/// Density and recall of a method on a call.
pub(super) fn measured(text: &str, data: &TestCall) -> (f64, f64) {
    let chosen = select(text, data);
    (density(&chosen).token, recall_of(data, &chosen))
}

/// Recall of a selection on a call.
pub(super) fn recall_of(data: &TestCall, chosen: &Selected) -> f64 {
    let (sparse, dense) = (attend(data, chosen), dense_attention(&data.call()).expect("valid"));
    recall(&sparse.lse, &dense.lse)
}

#[test]
fn recall_of_everything_is_one_and_of_a_mask_is_its_dense_mass() {
    let data = TestCall::structured(&mut Random(81), 200, [2, 1], 16);
    let (density, all) = measured("meanpool:block=16,tau=1", &data);
    assert!((density - 1.0).abs() < 1e-12 && (all - 1.0).abs() < 1e-5);
    let chosen = select("meanpool:block=16,tau=0.4", &data);
    let some = recall_of(&data, &chosen);
    let (call, dense) = (data.call(), oracle_dense(&data.call()));
    let mut mass = 0.0;
    for head in 0..2 {
        for row in 0..200 {
            let shown = crate::oracle::expanded_row(&chosen.mask, head, row);
            let (_, lse) = crate::oracle::oracle_row(&call, head, row, &shown);
            mass += (lse - dense.lse[head * 200 + row]).exp() / 400.0;
        }
    }
    assert!((some - mass).abs() < 1e-5, "{some} {mass}");
}

#[test]
fn momo_exact_choice_is_close_to_the_oracle() {
    let data = TestCall::structured(&mut Random(84), 512, [2, 1], 16);
    let (density, kept) =
        measured("momo:gamma=4,beta=16,chi=16,k=8,topk=exact,first_dense_layers=0,mode=sparse_only", &data);
    let oracle = (1..=32)
        .map(|k| measured(&format!("oracle_topk:block=16,k={k}"), &data))
        .find(|oracle| oracle.0 >= density)
        .expect("all blocks are enough");
    assert!(oracle.1 - kept < 0.05, "{kept} {oracle:?}");
}

#[test]
fn estimates_beat_ranges_at_equal_density_where_topics_return() {
    let data = TestCall::structured(&mut Random(85), 512, [2, 1], 16);
    let estimate = measured("xattention:block=16,stride=4,tau=0.6", &data);
    let ranges = (1..512)
        .step_by(16)
        .map(|local| measured(&format!("streamingllm:n_init=16,n_local={local}"), &data))
        .find(|ranges| ranges.0 >= estimate.0)
        .expect("all tokens are enough");
    assert!(estimate.1 > ranges.1, "{estimate:?} {ranges:?}");
    // A selector's printed text reads back as the same selector.
    let text = selector("xattention:block=16,stride=4,tau=0.6").to_string();
    assert_eq!(select(&text, &data).mask, select("xattention:block=16,stride=4,tau=0.6", &data).mask);
}
