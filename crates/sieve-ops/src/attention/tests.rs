use super::{attention, attention_with_sinks};
use crate::testing::{
    Ad, Float, Input, Random, RandomInput, assert_close, check_finite_differences, check_later_tokens_change_nothing,
    check_other_documents_change_nothing, check_parity, check_views, documents, float, host, primitive,
};
use crate::{AttentionCall, AttentionSpec, DeviceBackend, Documents, reference};
use burn::tensor::{DType, Int, Tensor};
use burn_flex::Flex;
use sieve_core::FarKeys;

/// Three KV heads with `group_size` query heads each.
fn spec(group_size: usize, head_dim: usize, window_size: Option<usize>) -> AttentionSpec {
    AttentionSpec { window_size, ..AttentionSpec::dense([3 * group_size, 3], head_dim) }
}

/// As [`spec`], with a window of 6 and beyond it `sink_tokens` first tokens and bands up to a distance of `end`.
fn far(group_size: usize, head_dim: usize, [sink_tokens, end]: [usize; 2]) -> AttentionSpec {
    let far = FarKeys { sink_tokens, distances: [6, end], num_bands: 3, first_band: 0 };
    AttentionSpec { far: Some(far), ..spec(group_size, head_dim, Some(6)) }
}

/// A random packed tensor.
fn packed(spec: AttentionSpec, [batch, seq_len, head_dim]: [usize; 3], seed: u64) -> Input {
    // Values that give both large and small logits.
    let dims = [batch, seq_len, spec.packed_heads(), head_dim];
    Random(seed).input(&dims).affine(1.5, 0.0)
}

fn run(qkv: &Float, documents: &Documents<Ad>, spec: AttentionSpec) -> Float {
    primitive(attention(float(qkv), documents, spec))
}

fn reference_run(qkv: &Float, documents: &Documents<Ad>, spec: AttentionSpec) -> Float {
    reference::attention::<Ad>(qkv.clone(), &AttentionCall::new(documents.bounds(), spec)).o
}

#[test]
fn the_last_tokens_attend_as_ever_where_those_before_them_see_themselves_alone() {
    let tokens = super::WHOLE_TILES * 2 + 90;
    for window_size in [None, Some(40), Some(500)] {
        let spec = spec(2, 16, window_size);
        let qkv = packed(spec, [2, tokens, 16], 5).untracked(DType::F32);
        let documents = documents::<Ad>(&[], [2, tokens]);
        let all = AttentionCall::new(documents.bounds(), spec);
        let whole = float::<4>(&reference::attention::<Ad>(qkv.clone(), &all).o);
        for first in [1, 383, 384, 500, 768, 850] {
            let bounds = super::alone_before::<Ad>(documents.bounds(), first);
            let last =
                float::<4>(&reference::attention::<Ad>(qkv.clone(), &AttentionCall::new(bounds.clone(), spec)).o);
            let [whole, last] = [&whole, &last].map(|o| o.clone().narrow(1, first, tokens - first).into_data());
            assert_eq!(whole, last, "{window_size:?} {first}");
            // The other tokens see one key each, up to the tile of the first of the last ones.
            let start: Vec<i64> =
                Tensor::<Ad, 2, Int>::from_primitive(bounds[0].clone()).into_data().iter::<i64>().collect();
            let alone = first / super::WHOLE_TILES * super::WHOLE_TILES;
            let expected = |at: usize| if at < alone { at as i64 } else { 0 };
            assert!(start.iter().enumerate().all(|(at, &start)| start == expected(at % tokens)), "{first}");
        }
    }
}

/// Compares attention with its reference, and views with contiguous inputs. `dims` are batch, tokens and head_dim;
/// `lengths` are those of the documents.
fn check(spec: AttentionSpec, dims: [usize; 3], lengths: &[usize]) {
    let inputs = [packed(spec, dims, 1)];
    let documents = documents::<Ad>(lengths, [dims[0], dims[1]]);
    let what = format!("attention {spec:?} {dims:?} {lengths:?}");
    let op = |inputs: &[Float]| run(&inputs[0], &documents, spec);
    check_parity(&what, &inputs, &op, &|inputs| reference_run(&inputs[0], &documents, spec));
    check_views(&what, &inputs, &op);
}

#[test]
fn attention_equals_the_reference_dense_and_in_windows() {
    let windows = [1, 7, 63, 100].map(|window_size| (2, 16, Some(window_size)));
    for (group_size, head_dim, window_size) in [(1, 16, None), (2, 20, None), (4, 7, None)].into_iter().chain(windows) {
        let spec = spec(group_size, head_dim, window_size);
        for lengths in [&[][..], &[5, 1, 1, 30], &[9, 1, 1, 40]] {
            check(spec, [2, 63, head_dim], lengths);
        }
        check(spec, [1, 1, head_dim], &[]);
    }
    // More than one tile of queries and of keys.
    check(spec(2, 32, None), [1, 193, 32], &[100]);
    check(spec(4, 32, Some(40)), [1, 193, 32], &[100]);
}

#[test]
fn attention_equals_the_reference_with_keys_beyond_the_window() {
    for (group_size, head_dim, sizes) in [(1, 16, [0, 30]), (2, 20, [3, 63]), (4, 7, [5, 1000]), (2, 16, [2, 6])] {
        let spec = far(group_size, head_dim, sizes);
        for lengths in [&[][..], &[5, 1, 1, 30], &[9, 1, 1, 40]] {
            check(spec, [2, 63, head_dim], lengths);
        }
        check(spec, [1, 1, head_dim], &[]);
    }
    check(far(4, 32, [7, 150]), [1, 193, 32], &[100]);
    check(far(2, 32, [7, 400]), [1, 393, 32], &[]);
}

#[test]
fn log_sum_exp_equals_the_reference() {
    let spec = spec(2, 16, Some(7));
    let qkv = packed(spec, [2, 63, 16], 2);
    let call = AttentionCall::new(documents::<Flex>(&[20, 1], [2, 63]).bounds(), spec);
    let lse = |dtype| {
        let qkv = qkv.tensor(dtype);
        host(<Flex as DeviceBackend>::attention(qkv, &call).lse)
    };
    assert_close("lse", &lse(DType::F32), &lse(DType::F64), 2e-6);
}

#[test]
fn gradients_equal_finite_differences() {
    for window_size in [None, Some(3)] {
        let spec = spec(2, 4, window_size);
        let documents = documents::<Ad>(&[4, 1], [2, 9]);
        let inputs = [packed(spec, [2, 9, 4], 3)];
        let op = |inputs: &[Float]| run(&inputs[0], &documents, spec);
        check_finite_differences("attention", &inputs, &op);
    }
    let (spec, documents) = (far(2, 4, [2, 13]), documents::<Ad>(&[3], [1, 17]));
    let op = |inputs: &[Float]| run(&inputs[0], &documents, spec);
    check_finite_differences("attention with far keys", &[packed(spec, [1, 17, 4], 3)], &op);
}

#[test]
fn document_bounds_may_be_views() {
    let spec = spec(1, 16, None);
    let stored = documents::<Ad>(&[20, 1], [2, 37]);
    let transposed = |x: burn::tensor::Tensor<Ad, 2, burn::tensor::Int>| {
        let rows: Vec<i32> = x.swap_dims(0, 1).into_data().to_vec().expect("i32");
        crate::testing::ints(rows, [37, 2]).swap_dims(0, 1)
    };
    let viewed = Documents {
        start: transposed(stored.start.clone()),
        end: transposed(stored.end.clone()),
        positions: stored.positions.clone(),
    };
    let qkv = packed(spec, [2, 37, 16], 5).untracked(DType::F32);
    assert_eq!(host(run(&qkv, &viewed, spec).primitive), host(run(&qkv, &stored, spec).primitive));
}

#[test]
fn later_tokens_and_other_documents_change_no_bit_of_a_row() {
    let windows = [None, Some(1), Some(40)].map(|window_size| spec(2, 16, window_size));
    for spec in windows.into_iter().chain([far(2, 16, [3, 100])]) {
        let op = |inputs: &[Float], documents: &Documents<Ad>| run(&inputs[0], documents, spec);
        check_later_tokens_change_nothing([packed(spec, [1, 150, 16], 6)], 0.0, &op);
    }
    for spec in [spec(2, 16, None), spec(2, 16, Some(20)), far(2, 16, [3, 100])] {
        let op = |inputs: &[Float], documents: &Documents<Ad>| run(&inputs[0], documents, spec);
        check_other_documents_change_nothing([packed(spec, [1, 120, 16], 7)], 0.0, &op);
    }
}

/// Attention of the packed tensor `inputs[0]` with the sinks `inputs[1]`.
fn with_sinks(inputs: &[Float], documents: &Documents<Ad>, spec: AttentionSpec) -> Float {
    primitive(attention_with_sinks(float(&inputs[0]), float(&inputs[1]), documents, spec))
}

/// A tensor filled with `value`.
fn constant(value: f64, dims: &[usize]) -> Float {
    Random(1).input(dims).affine(0.0, value).untracked(DType::F32)
}

#[test]
fn sinks_equal_the_reference_in_values_and_gradients() {
    for (group_size, head_dim, window_size) in [(1, 16, None), (2, 20, Some(7)), (4, 7, Some(1)), (2, 32, Some(40))] {
        let spec = spec(group_size, head_dim, window_size);
        for (dims, lengths) in
            [([2, 63, head_dim], &[5, 1, 1, 30][..]), ([1, 1, head_dim], &[]), ([2, 63, head_dim], &[])]
        {
            let inputs = [packed(spec, dims, 8), Random(9).input(&[3 * group_size]).affine(3.0, 0.5)];
            let documents = documents::<Ad>(lengths, [dims[0], dims[1]]);
            let what = format!("sinks {spec:?} {dims:?} {lengths:?}");
            let op = |inputs: &[Float]| with_sinks(inputs, &documents, spec);
            check_parity(&what, &inputs, &op, &|inputs| {
                let call = AttentionCall::new(documents.bounds(), spec);
                let output = reference::attention::<Ad>(inputs[0].clone(), &call);
                reference::join_sinks::<Ad>(output, inputs[1].clone()).o
            });
            check_views(&what, &inputs, &op);
        }
    }
}

#[test]
fn gradients_of_sinks_equal_finite_differences() {
    for window_size in [None, Some(3)] {
        let spec = spec(2, 4, window_size);
        let documents = documents::<Ad>(&[4, 1], [2, 9]);
        let inputs = [packed(spec, [2, 9, 4], 3), Random(10).input(&[6])];
        check_finite_differences("sinks", &inputs, &|inputs| with_sinks(inputs, &documents, spec));
    }
}

#[test]
fn a_sink_is_a_key_whose_value_is_zero() {
    // In a row that begins with a key of zeros, every query gives it the logit 0.
    let spec = spec(2, 16, None);
    let qkv = packed(spec, [1, 21, 16], 11).untracked(DType::F32);
    let first = constant(0.0, &[1, 1, spec.packed_heads(), 16]);
    let longer = burn::tensor::Tensor::<Ad, 4>::cat(vec![float(&first), float(&qkv)], 1);
    let [whole, longer_row] = [21, 22].map(|len| documents::<Ad>(&[], [1, len]));
    let wanted = attention(longer, &longer_row, spec).narrow(1, 1, 21);
    let got = with_sinks(&[qkv, constant(0.0, &[6])], &whole, spec);
    assert_close("o", &host(got.primitive), &host(primitive(wanted).primitive), 2e-6);
}

#[test]
fn sinks_of_minus_infinity_change_no_bit_and_large_ones_make_the_output_zero() {
    let spec = spec(2, 16, Some(7));
    let documents = documents::<Ad>(&[20, 1], [2, 37]);
    let qkv = packed(spec, [2, 37, 16], 12).untracked(DType::F32);
    let o = |value| host(with_sinks(&[qkv.clone(), constant(value, &[6])], &documents, spec).primitive);
    assert_eq!(o(f64::NEG_INFINITY), host(run(&qkv, &documents, spec).primitive));
    assert!(o(1e30).iter().all(|x| *x == 0.0));
}
