//! Each method's lists equal the ones that an independent program computed (`tests/golden/selectors`).

use std::collections::BTreeSet;

use safetensors::SafeTensors;

use crate::call::Call;
use crate::decode::dam::DamCapture;
use crate::mask::Selected;
use crate::pool::last_rows;
use crate::test_data::TestCall;
use crate::{KeyMask, Method, Selector};

/// The stored lists; rewritten by `tests/golden/selectors/make_lists.py`.
static FILE: &[u8] = crate::test_data::LISTS;

fn i32s(file: &SafeTensors<'_>, name: &str) -> Vec<i32> {
    let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    let words = tensor.data().as_chunks::<4>().0;
    words.iter().map(|b| i32::from_le_bytes(*b)).collect()
}

/// The rows of a stored ragged array; a row is the part of `idx` between two bounds in `ptr`.
fn stored_rows(file: &SafeTensors<'_>, name: &str) -> Vec<Vec<i32>> {
    let [ptr, idx] = ["ptr", "idx"].map(|part| i32s(file, &format!("{name}{part}")));
    ptr.windows(2).map(|bounds| idx[bounds[0] as usize..bounds[1] as usize].to_vec()).collect()
}

/// The `count` stored cases of one method: (name of the inputs, its tokens or token, selector).
fn cases(file: &SafeTensors<'_>, method: &str, count: usize) -> Vec<(String, String, String)> {
    let names: BTreeSet<&str> = file.names().into_iter().collect();
    let cases: Vec<_> = names
        .into_iter()
        .filter_map(|name| {
            let parts: Vec<&str> = name.split('/').collect();
            let [inputs, place, text, "ptr"] = parts[..] else {
                return None;
            };
            (text.split(':').next() == Some(method)).then(|| (inputs.to_owned(), place.to_owned(), text.to_owned()))
        })
        .collect();
    assert_eq!(cases.len(), count, "{method}");
    cases
}

/// Runs `check` on the mask of every stored call of a method.
fn masks(method: &str, count: usize, check: impl Fn(&SafeTensors<'_>, &str, &Selected, &Call<'_>)) {
    let file = SafeTensors::deserialize(FILE).expect("the stored lists");
    for (name, place, text) in cases(&file, method, count) {
        let (context, end) = place.split_once('-').expect("a range");
        let (context, end): (usize, usize) = (context.parse().expect("a number"), end.parse().expect("a number"));
        let data = TestCall::stored(&name);
        let call = data.call().chunk(context..end);
        check(&file, &format!("{name}/{place}/{text}"), &super::select_of(&text, &call), &call);
    }
}

/// Tiles equal the stored ones, with the first differing row in the message.
fn same_tiles(file: &SafeTensors<'_>, case: &str, chosen: &Selected, _: &Call<'_>) {
    same_rows(file, case, "", &chosen.mask, |list, i| chosen.mask.row(list, i));
}

/// The stored rows of an array equal `row_of(list, query tile)`.
fn same_rows<'m>(
    file: &SafeTensors<'_>,
    case: &str,
    array: &str,
    mask: &KeyMask,
    row_of: impl Fn(usize, usize) -> &'m [i32],
) {
    let stored = stored_rows(file, &format!("{case}/{array}"));
    let tiles = mask.tiles.num_query_tiles();
    assert_eq!(stored.len(), mask.num_lists() * tiles, "{case}: another number of rows");
    for (row, expected) in stored.iter().enumerate() {
        assert_eq!(row_of(row / tiles, row % tiles), expected, "{case}: {array} of row {row}");
    }
}

macro_rules! golden {
    ($($test:ident: $check:expr;)+) => {$(
        #[test]
        fn $test() {
            $check;
        }
    )+};
}

golden! {
    golden_bfla: masks("bfla", 27, same_tiles);
    golden_momo: masks("momo", 108, same_tiles);
    golden_xattention: masks("xattention", 27, same_tiles);
    golden_flexprefill: masks("flexprefill", 81, same_tiles);
    golden_meanpool: masks("meanpool", 49, same_tiles);
    golden_block_sparse: masks("block_sparse", 14, same_tiles);
    golden_oracle_topk: masks("oracle_topk", 14, same_tiles);
    golden_ba_att: masks("ba_att", 38, same_tiles);
    golden_infinitehip: masks("infinitehip", 7, same_tiles);
    golden_quest: tokens("quest", 27);
    golden_exact_top: tokens("exact_top", 8);
    golden_h2o: tokens("h2o", 8);
    golden_snapkv: tokens("snapkv", 8);
}

#[test]
fn golden_pbs() {
    masks("pbs", 54, |file, case, chosen, call| {
        let order = i32s(file, &format!("{case}/order"));
        same_order(chosen.mask.key_order(), &order, call, case);
        same_tiles(file, case, chosen, call);
    });
}

/// Each slot has the stored key, or one with the same importance up to rounding: a processor with other vector
/// instructions sums in another order, and so exchanges such keys.
fn same_order(found: &[i32], stored: &[i32], call: &Call<'_>, case: &str) {
    let num_keys = call.shape.num_keys;
    assert_eq!(found.len(), stored.len(), "{case}");
    let orders = found.chunks(num_keys).zip(stored.chunks(num_keys));
    for (list, (found, stored)) in orders.enumerate().filter(|(_, (found, stored))| found != stored) {
        // With permuted queries or an order per query head, `importance` below would need other rows and heads.
        assert!(!case.contains("permute=") && !case.contains("perm="), "{case}: another order");
        let heads = call.shape.num_heads / call.shape.num_kv_heads;
        let block = case.split("block=").nth(1).and_then(|text| text.split(',').next());
        let block = block.and_then(|text| text.parse().ok()).expect("a block");
        let importance = importance(call, list * heads..(list + 1) * heads, block);
        for (&found, &stored) in found.iter().zip(stored) {
            let [found, stored] = [found, stored].map(|key| importance[key as usize]);
            let apart = (found - stored).abs() / found.max(stored);
            assert!(apart <= 1e-6, "{case}: keys of other importance, {found} and {stored}");
        }
        let [found, stored] = [found, stored].map(|order| order.iter().collect::<BTreeSet<_>>());
        assert_eq!(found, stored, "{case}: other keys");
    }
}

/// The attention that each key received from the last `block` queries of some heads (arXiv:2510.21270, eq. 10), summed
/// in f64.
fn importance(call: &Call<'_>, heads: std::ops::Range<usize>, block: usize) -> Vec<f64> {
    let mut sum = vec![0.0; call.shape.num_keys];
    for head in heads {
        for row in last_rows(call, block) {
            let q = call.query(head, row);
            let logit = |key| {
                let pairs = q.iter().zip(call.key(call.kv_head(head), key));
                pairs.map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>() * f64::from(call.shape.softmax_scale())
            };
            let weights: Vec<f64> = (0..=call.shape.context() + row).map(|key| logit(key).exp()).collect();
            let total: f64 = weights.iter().sum();
            sum.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight / total);
        }
    }
    sum
}

#[test]
fn golden_pbs_order_of_queries() {
    let file = SafeTensors::deserialize(FILE).expect("the stored lists");
    let text = "pbs:block=16,segment=64,tau=0.5,permute=queries";
    for name in ["random.4.2", "structured.4.2"] {
        let chosen = super::select(text, &TestCall::stored(name).part(0..230));
        let order = i32s(&file, &format!("{name}/query_order/{text}"));
        assert_eq!(chosen.mask.query_order(), order, "{name}");
        assert!(chosen.mask.key_order().is_empty(), "{name}");
    }
}

#[test]
fn golden_vertical_slash() {
    masks("vertical_slash", 27, |file, case, chosen, call| {
        same_tiles(file, case, chosen, call);
        same_rows(file, case, "col_", &chosen.mask, |list, i| chosen.mask.columns(list, i));
    });
}

/// Compares the keys that a token reads at the end of a stream, or right after a prompt, with the stored ones.
fn tokens(method: &str, count: usize) {
    let file = SafeTensors::deserialize(FILE).expect("the stored lists");
    for (name, place, text) in cases(&file, method, count) {
        let data = TestCall::stored(&name);
        let (form, token) = place.split_once('-').expect("a form and a token");
        let token: usize = token.parse().expect("a number");
        let mut session = super::decode::session(&text, &data);
        let [q, k, v] = data.tokens(0..token);
        match form {
            "token" => session.stream(q, k, v).map(drop).expect("valid"),
            "prompt" => session.take_prompt(q, k, v).expect("valid"),
            form => panic!("{form}"),
        }
        let [q, k, v] = data.tokens(token..token + 1);
        session.step(q, k, v).expect("valid");
        let case = format!("{name}/{place}/{text}");
        let stored = stored_rows(&file, &format!("{case}/"));
        assert_eq!(session.kept().len(), stored.len(), "{case}");
        for (list, (kept, stored)) in session.kept().iter().zip(stored).enumerate() {
            let kept: Vec<i32> = kept.iter().map(|&key| key as i32).collect();
            assert_eq!(kept, stored, "{case}, list {list}");
        }
    }
}

/// Compares the maps of a calibration on three sequences of 40 tokens: their rows, columns and distances.
#[test]
fn golden_dam() {
    let file = SafeTensors::deserialize(FILE).expect("the stored lists");
    for (name, place, text) in cases(&file, "dam", 2) {
        let (data, case) = (TestCall::stored(&name), format!("{name}/{place}/{text}"));
        let selector = Selector::parse(&text).expect("valid");
        let Method::Dam(config) = selector.method else {
            panic!("{case}: another method");
        };
        let mut capture = DamCapture::new(config, data.shape.num_heads).expect("valid");
        for first in [0, 40, 80] {
            capture.add(&data.part(first..first + 40).call()).expect("valid");
        }
        let stored = stored_rows(&file, &format!("{case}/"));
        let maps = capture.maps();
        let found = maps.iter().flat_map(|map| map.rows.iter().chain([&map.columns, &map.offsets]));
        for (at, found) in found.enumerate() {
            let found: Vec<i32> = found.iter().map(|&key| key as i32).collect();
            assert_eq!(found, stored[at], "{case}, row {at}");
        }
    }
}
