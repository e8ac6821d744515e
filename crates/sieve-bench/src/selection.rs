//! DMA's selection and key lists against the oracle, entry by entry.
use crate::case::{Case, Cuts, Keys};
use crate::device::Device;
use crate::error::Result;
use crate::extent::Extent;
use crate::on_device::OnDevice;
use crate::place::{self, Place};
use crate::report::Report;
use crate::scores::Scores;
use sieve_kernels::{AttentionShape, CudaTensor, KeyLists, Selection, dma_lists, oracle};
use sieve_testing::Random;

/// Random windows over every length, each length with and without a local window in turn, and then the fixed ones.
fn cases(extent: &Extent) -> impl Iterator<Item = Result<(Case, String)>> {
    let mut random = Random(extent.seed);
    let lengths = extent.lengths;
    let mut draws = Vec::new();
    for at in 0..extent.few() {
        let seq_len = lengths[at % lengths.len()];
        let kept = random.one_of(&[1, 2, 31, 64, 100, 1024, 2048, 3 * seq_len]);
        let keys = match (at + at / lengths.len()) % 2 {
            0 => Keys::chosen(kept),
            _ => Keys::local_of(kept, &mut random),
        };
        let cuts = random.one_of(&[Cuts::Count(1), Cuts::Few, Cuts::Mixed, Cuts::Tokens]);
        draws.push((seq_len, keys, cuts));
    }
    let fixed = extent.local_windows.iter();
    let fixed =
        fixed.map(|&[seq_len, kept, local]| (seq_len, Keys::local(kept, local), Cuts::Count(2)));
    draws.extend(fixed);
    draws.into_iter().map(move |(seq_len, keys, cuts)| {
        let shape = AttentionShape {
            batch: random.between(1, 3),
            seq_len,
            num_heads: 2,
            num_kv_heads: 2,
            head_dim: 16,
            head_dim_v: 16,
        };
        let scores = &Scores::RANDOM[random.below(Scores::RANDOM.len())];
        let seed = random.between(0, 1 << 30) as u64;
        let label = format!(
            "batch={},seq_len={seq_len} {keys} {cuts:?} {} seed {seed}",
            shape.batch,
            scores.name()
        );
        Ok((Case::draw(shape, keys, cuts, scores, seed)?, label))
    })
}

/// `expire` of the op of `B`.
pub(crate) fn check_ops<B: Place>(
    report: &mut Report,
    device: &B::Device,
    extent: &Extent,
    path: &str,
) -> Result<()> {
    for case in cases(extent) {
        let (case, label) = case?;
        let outcome = if place::select::<B>(&case, device) == case.expire {
            Ok(0.0)
        } else {
            Err("expire differs from the heap".to_owned())
        };
        let name = format!("op dma_select{}", case.keys.suffix());
        report.add(&name, path, &label, outcome);
    }
    Ok(())
}

/// The wrappers: `expire`, the lists made from it, and the lists made from `expire` alone.
pub(crate) fn check_wrappers(
    report: &mut Report,
    device: &dyn Device,
    extent: &Extent,
) -> Result<()> {
    let mut random = Random(extent.seed);
    for case in cases(extent) {
        let (case, label) = case?;
        let tile_queries = random.one_of(&[32, KeyLists::TILE_QUERIES, 128]);
        let call = OnDevice::new(&case, device);
        let named = |kernel: &str| format!("{kernel}{}", case.keys.suffix());
        let selection = match call.select() {
            Ok(selection) => selection,
            Err(error) => {
                report.add("dma_select", "refused", &label, Err(error.to_string()));
                continue;
            }
        };
        let expire = match device.ints(&selection.expire) {
            Ok(expire) if expire == case.expire => Ok(0.0),
            Ok(_) => Err("expire differs from the heap".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        report.add(&named("dma_select"), "kernel", &label, expire);
        let lists = dma_lists(&selection, &call.doc_start, &call.doc_end, tile_queries);
        let outcome = lists
            .map_err(|e| e.to_string())
            .and_then(|lists| compare(&lists, &case, device));
        report.add(&named("dma_lists"), "kernel", &label, outcome);
        let rebuilt = Selection::of_expire(&selection.expire, &call.doc_start, case.window())
            .and_then(|s| dma_lists(&s, &call.doc_start, &call.doc_end, tile_queries))
            .map_err(|e| e.to_string())
            .and_then(|lists| compare(&lists, &case, device));
        report.add(
            &named("dma_lists from expire alone"),
            "kernel",
            &label,
            rebuilt,
        );
    }
    Ok(())
}

fn compare(lists: &KeyLists, case: &Case, device: &dyn Device) -> Result<f32, String> {
    let read = |tensor: &CudaTensor| device.ints(tensor).map_err(|e| e.to_string());
    let (entries, lengths) = (read(&lists.list)?, read(&lists.list_len)?);
    let entering = read(&lists.num_entering)?;
    let windows = read(&lists.tile_window)?;
    let seq_len = case.shape.seq_len;
    let (blocks, capacity) = (lists.num_super_blocks(), lists.capacity());
    let tiles = seq_len.div_ceil(lists.tile_queries);
    for (row, expire) in case.expire.chunks_exact(seq_len).enumerate() {
        for block in 0..blocks {
            let expected = oracle::key_list(expire, block);
            let at = row * blocks + block;
            let length = lengths[at] as usize;
            if length > capacity {
                return Err(format!(
                    "row {row}, block {block}: {length} entries, room for {capacity}"
                ));
            }
            let got = entries[at * capacity * 2..][..length * 2].chunks_exact(2);
            let equal = got.eq(expected.entries.iter().map(|entry| &entry[..]));
            // Whole tiles of 128 are read: what fills the last one is a real key that no query sees.
            let padding = entries[at * capacity * 2..]
                [length * 2..length.next_multiple_of(128) * 2]
                .chunks_exact(2);
            if !padding.eq(std::iter::repeat_n(
                &[expected.entries[0][0], 0][..],
                length.next_multiple_of(128) - length,
            )) {
                return Err(format!("the padding of row {row}, block {block} differs"));
            }
            if !equal || entering[at] as usize != expected.num_entering {
                return Err(format!("the list of row {row}, block {block} differs"));
            }
            let first_query = block * oracle::SUPER_BLOCK;
            let end = (first_query + oracle::SUPER_BLOCK).min(seq_len);
            for first in (first_query..end).step_by(lists.tile_queries) {
                let last = (first + lists.tile_queries).min(end) - 1;
                let at = (row * tiles + first / lists.tile_queries) * 2;
                if windows[at..at + 2] != oracle::tile_window(&expected, first, last) {
                    return Err(format!(
                        "the tile window of row {row}, query {first} differs"
                    ));
                }
            }
        }
    }
    Ok(0.0)
}
