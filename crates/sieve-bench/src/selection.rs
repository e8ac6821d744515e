//! DMA's selection and key lists against the oracle, entry by entry.
use crate::case::{Case, Cuts, Keys};
use crate::error::Result;
use crate::on_cuda::{OnCuda, download_ints};
use crate::place::{self, Place};
use crate::random::Random;
use crate::report::Report;
use crate::scores::Scores;
use burn_cuda::CudaDevice;
use sieve_kernels::{
    AttentionShape, KeyLists, TILE_QUERIES, dma_lists, oracle, selection_of_expire,
};

/// Sizes with one block, several super-blocks, several blocks of survivors.
const LENGTHS: [usize; 8] = [1, 2, 63, 1024, 1025, 3000, 8193, 20001];

fn cases(count: usize, seed: u64) -> impl Iterator<Item = Result<(Case, String)>> {
    let mut random = Random::new(seed);
    (0..count).map(move |at| {
        let seq_len = LENGTHS[at % LENGTHS.len()];
        let shape = AttentionShape {
            batch: random.between(1, 3),
            seq_len,
            num_heads: 2,
            num_kv_heads: 2,
            head_dim: 16,
            head_dim_v: 16,
        };
        let kept = random.one_of(&[1, 2, 31, 64, 100, 1024, 2048, 3 * seq_len]);
        let cuts = random.one_of(&[Cuts::Count(1), Cuts::Few, Cuts::Mixed, Cuts::Tokens]);
        let scores = &Scores::RANDOM[random.below(Scores::RANDOM.len())];
        let seed = random.between(0, 1 << 30) as u64;
        let label = format!(
            "batch={},seq_len={seq_len} keep {kept} {cuts:?} {} seed {seed}",
            shape.batch,
            scores.name()
        );
        Ok((
            Case::draw(shape, Keys::Chosen(kept), cuts, scores, seed)?,
            label,
        ))
    })
}

/// `expire` of the op of `B`.
pub(crate) fn check_ops<B: Place>(
    report: &mut Report,
    device: &B::Device,
    count: usize,
    seed: u64,
    path: &str,
) -> Result<()> {
    for case in cases(count, seed) {
        let (case, label) = case?;
        let outcome = if place::select::<B>(&case, device) == case.expire {
            Ok(0.0)
        } else {
            Err("expire differs from the heap".to_owned())
        };
        report.add("op dma_select", path, &label, outcome);
    }
    Ok(())
}

/// The wrappers: `expire`, the lists made from it, and the lists made from `expire` alone.
pub(crate) fn check_wrappers(
    report: &mut Report,
    device: &CudaDevice,
    count: usize,
    seed: u64,
) -> Result<()> {
    for case in cases(count, seed) {
        let (case, label) = case?;
        let call = OnCuda::new(&case, device);
        let selection = match call.select() {
            Ok(selection) => selection,
            Err(error) => {
                report.add("dma_select", "refused", &label, Err(error.to_string()));
                continue;
            }
        };
        let expire = if download_ints(&selection.expire) == case.expire {
            Ok(0.0)
        } else {
            Err("expire differs from the heap".to_owned())
        };
        report.add("dma_select", "kernel", &label, expire);
        let lists = dma_lists(&selection, &call.doc_start, &call.doc_end, TILE_QUERIES);
        let outcome = lists
            .map_err(|e| e.to_string())
            .and_then(|lists| compare(&lists, &case));
        report.add("dma_lists", "kernel", &label, outcome);
        let rebuilt = selection_of_expire(&selection.expire, &call.doc_start, case.window())
            .and_then(|s| dma_lists(&s, &call.doc_start, &call.doc_end, TILE_QUERIES))
            .map_err(|e| e.to_string())
            .and_then(|lists| compare(&lists, &case));
        report.add("dma_lists from expire alone", "kernel", &label, rebuilt);
    }
    Ok(())
}

fn compare(lists: &KeyLists, case: &Case) -> Result<f32, String> {
    let (entries, lengths) = (download_ints(&lists.list), download_ints(&lists.list_len));
    let entering = download_ints(&lists.num_entering);
    let windows = download_ints(&lists.tile_window);
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
