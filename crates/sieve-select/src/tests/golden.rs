//! Lists of an independent computation (`tests/golden/selectors`), method by method.

use std::collections::BTreeMap;

use safetensors::SafeTensors;

use crate::call::Call;
use crate::mask::SparseMask;
use crate::test_data::Inputs;
use crate::{DecodeSession, Selector};

/// The stored lists; rewritten by `tests/golden/selectors/make_lists.py`.
static FILE: &[u8] = crate::test_data::LISTS;

fn i32s(file: &SafeTensors<'_>, name: &str) -> Vec<i32> {
    let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    let words = tensor.data().as_chunks::<4>().0;
    words.iter().map(|b| i32::from_le_bytes(*b)).collect()
}

/// Cases of one method: (inputs, place, selector).
fn cases(file: &SafeTensors<'_>, method: &str) -> Vec<(String, String, String)> {
    let names: BTreeMap<String, ()> = file.names().into_iter().map(|name| (name.to_owned(), ())).collect();
    let cases: Vec<_> = names
        .keys()
        .filter_map(|name| {
            let parts: Vec<&str> = name.split('/').collect();
            let [inputs, place, text, "ptr"] = parts[..] else {
                return None;
            };
            (text.split(':').next() == Some(method)).then(|| (inputs.to_owned(), place.to_owned(), text.to_owned()))
        })
        .collect();
    let trained = cases.iter().filter(|case| case.0.starts_with("trained"));
    assert!(
        trained.count() >= 9 && cases.len() >= 27,
        "{method}: {} cases",
        cases.len()
    );
    cases
}

/// Runs `check` on the mask of every stored call of a method.
fn masks(method: &str, check: impl Fn(&SafeTensors<'_>, &str, &SparseMask)) {
    let file = SafeTensors::deserialize(FILE).expect("the stored lists");
    for (name, place, text) in cases(&file, method) {
        let inputs = Inputs::stored(&name);
        let (context, end) = place.split_once('-').expect("a range");
        let (context, end): (usize, usize) = (context.parse().expect("a number"), end.parse().expect("a number"));
        let shape = crate::test_data::shape(
            [end - context, end],
            [inputs.num_heads, inputs.num_kv_heads],
            inputs.head_dim,
        );
        let [q, k] = inputs.tokens(context, end);
        let call = Call::new(shape, q, k, k).expect("the sizes fit");
        let mut selector = Selector::parse(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
        selector.common.min_prefill_tokens = 0;
        let mask = selector.select(&call).unwrap_or_else(|e| panic!("{text}: {e}"));
        mask.check(&call).unwrap_or_else(|e| panic!("{text}: {e}"));
        check(&file, &format!("{name}/{place}/{text}"), &mask);
    }
}

/// Tiles equal the stored ones, with the first differing row in the message.
fn same_tiles(file: &SafeTensors<'_>, case: &str, mask: &SparseMask) {
    let (ptr, idx) = (i32s(file, &format!("{case}/ptr")), i32s(file, &format!("{case}/idx")));
    assert_eq!(ptr.len(), mask.row_ptr.len(), "{case}: another number of rows");
    for row in 0..ptr.len() - 1 {
        let expected = &idx[ptr[row] as usize..ptr[row + 1] as usize];
        let got = &mask.tile_idx[mask.row_ptr[row] as usize..mask.row_ptr[row + 1] as usize];
        assert_eq!(got, expected, "{case}: row {row}");
    }
}

#[test]
fn golden_bfla() {
    masks("bfla", same_tiles);
}

#[test]
fn golden_momo() {
    masks("momo", same_tiles);
}

#[test]
fn golden_xattention() {
    masks("xattention", same_tiles);
}

#[test]
fn golden_pbs() {
    masks("pbs", |file, case, mask| {
        let order = i32s(file, &format!("{case}/order"));
        assert_eq!(mask.key_order, order, "{case}");
        same_tiles(file, case, mask);
    });
}

#[test]
fn golden_vertical_slash() {
    masks("vertical_slash", |file, case, mask| {
        same_tiles(file, case, mask);
        let col_idx = i32s(file, &format!("{case}/col_idx"));
        assert_eq!(mask.col_idx, col_idx, "{case}");
        if !mask.col_idx.is_empty() {
            assert_eq!(mask.col_ptr, i32s(file, &format!("{case}/col_ptr")), "{case}");
        }
    });
}

#[test]
fn golden_flexprefill() {
    masks("flexprefill", same_tiles);
}

#[test]
fn golden_quest() {
    let file = SafeTensors::deserialize(FILE).expect("the stored lists");
    for (name, place, text) in cases(&file, "quest") {
        let inputs = Inputs::stored(&name);
        let token: usize = place.trim_start_matches("token-").parse().expect("a number");
        let shape = crate::test_data::layer([inputs.num_heads, inputs.num_kv_heads], inputs.head_dim, 0);
        let mut session = DecodeSession::new(&Selector::parse(&text).expect("valid"), shape).expect("valid");
        let [q, k] = inputs.tokens(0, token + 1);
        session.stream(q, k, k).expect("valid");
        let case = format!("{name}/{place}/{text}");
        let (ptr, idx) = (i32s(&file, &format!("{case}/ptr")), i32s(&file, &format!("{case}/idx")));
        for (head, kept) in session.kept().iter().enumerate() {
            let expected: Vec<u32> = idx[ptr[head] as usize..ptr[head + 1] as usize]
                .iter()
                .map(|&j| j as u32)
                .collect();
            assert_eq!(*kept, expected, "{case}, head {head}");
        }
    }
}
