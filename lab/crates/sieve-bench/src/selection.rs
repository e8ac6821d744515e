//! Checks DMA's selection and key lists, entry by entry, against the CPU's definition.
use crate::case::{Case, Cuts, Keys};
use crate::device::Device;
use crate::error::Result;
use crate::extent::Extent;
use crate::on_device::OnDevice;
use crate::report::{Outcome, Report, Wrong, wrong};
use crate::scores::Scores;
use sieve_kernels::{
    AttentionShape, CudaTensor, DType, KeyLists, Selection, dma_halo_keys_backward, dma_halo_keys_forward,
    dma_last_kept, oracle,
};
use sieve_testing::{Random, round_bf16};

/// Tokens of a row: less than a super-block (1024 queries), several super-blocks, several blocks of 8192 tokens, at
/// whose ends a kernel stores the kept keys (survivors), and rows so long that the kernel searches `expire` in several
/// passes.
const LENGTHS: &[usize] = &[1, 2, 63, 1024, 1025, 3000, 8193, 20001, 131_073, 300_001];

/// Row lengths on the emulator.
const EMULATED_LENGTHS: &[usize] = &[1, 63, 1025, 2100];

/// Tokens, kept keys and local window of further selections: one short row, and rows of more than 16,384 tokens, whose
/// key lists start from survivors; with a local window a second kernel finds these.
const LOCAL_WINDOWS: &[[usize; 3]] = &[[1500, 400, 300], [16_385, 301, 300], [20_001, 2048, 300], [40_000, 300, 300]];

/// Random windows over every length, every second pass with a local window; then the fixed windows.
fn cases(extent: &Extent) -> impl Iterator<Item = Result<(Case, String)>> {
    let mut random = Random(extent.seed);
    let lengths = extent.pick(EMULATED_LENGTHS, LENGTHS);
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
    let fixed = extent.sizes(LOCAL_WINDOWS).iter();
    draws.extend(fixed.map(|&[seq_len, kept, local]| (seq_len, Keys::local(kept, local), Cuts::Count(2))));
    draws.into_iter().map(move |(seq_len, keys, cuts)| {
        let shape = AttentionShape::new(random.between(1, 3), seq_len, [2, 2], [16, 16]);
        let scores = &Scores::RANDOM[random.below(Scores::RANDOM.len())];
        let seed = random.between(0, 1 << 30) as u64;
        let label = format!("batch={},seq_len={seq_len} {keys} {cuts:?} {} seed {seed}", shape.batch, scores.name());
        Ok((Case::draw(shape, keys, cuts, scores, seed)?, label))
    })
}

/// Checks `expire`, the key lists of a selection, the lists rebuilt from `expire` alone, and the halo: the keys that a
/// rank of context parallelism hands to the next one.
pub(crate) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    let mut random = Random(extent.seed);
    for case in cases(extent) {
        let (case, label) = case?;
        let tile_queries = random.one_of(&[32, KeyLists::TILE_QUERIES, 128]);
        let call = OnDevice::new(&case, device);
        let selection = match call.select() {
            Ok(selection) => selection,
            Err(error) => {
                report.add("dma_select", "refused", &label, Err(error.into()));
                continue;
            }
        };
        let expire = device.ints(&selection.expire).map_err(Wrong::from);
        // The CPU computes the case's `expire` with a heap.
        let same_as_heap =
            |expire: Vec<i32>| if expire == case.expire { Ok(0.0) } else { wrong("expire differs from the heap") };
        let lists = |selection: &Selection| -> Outcome {
            let lists = call.inputs.lists_of(selection, tile_queries)?;
            compare(&lists, &case, device)
        };
        let rebuilt = Selection::of_expire(&selection.expire, &call.inputs.doc_start, case.window());
        for (kernel, outcome) in [
            ("dma_select", expire.and_then(same_as_heap)),
            ("dma_halo_keys", halo_keys(&selection.expire, &case, device, &mut random)),
            ("dma_lists", lists(&selection)),
            ("dma_lists from expire alone", rebuilt.map_err(Wrong::from).and_then(|s| lists(&s))),
        ] {
            let name = format!("{kernel}{}", case.keys.suffix());
            report.add(&name, "kernel", &label, outcome);
        }
    }
    Ok(())
}

/// Checks the halo kernels of context parallelism: they copy the keys that are still kept at the end of each row out of
/// a packed tensor, and add their gradients back.
fn halo_keys(expire: &CudaTensor, case: &Case, device: &dyn Device, random: &mut Random) -> Outcome {
    let (shape, head_dim) = (case.shape, 8 * random.between(1, 4));
    let (batch, seq_len, kv_heads) = (shape.batch, shape.seq_len, shape.num_kv_heads);
    let heads = 2 * kv_heads + random.between(0, 3);
    let slots = random.between(1, case.window().min(seq_len) + 1);
    let (kept, places) = (dma_last_kept(expire, slots)?, kept_at_end(case, slots));
    if device.ints(&kept)? != places {
        return wrong("other keys are kept at the end");
    }
    let mut make = |sizes: &[usize], dtype| {
        let values = random.bf16_normals(sizes.iter().product());
        (device.float(&values, sizes, dtype), values)
    };
    let (packed, x) = make(&[batch, seq_len, heads, head_dim], DType::BF16);
    let (rank, r) = make(&[batch, kv_heads, seq_len], DType::F32);
    let (d_keys, dx) = make(&[batch, slots, 2 * kv_heads, head_dim], DType::BF16);
    let (d_ranks, dr) = make(&[batch, kv_heads, slots], DType::F32);
    let sizes = HaloSizes { seq_len, heads, kv_heads, head_dim, slots };
    let expected = sizes.expected(&places, [&x, &r], [&dx, &dr]);
    let [keys, ranks] = dma_halo_keys_forward(&packed, &rank, &kept)?;
    // The gradients are added to the tensors that the keys were copied from.
    dma_halo_keys_backward([&packed, &rank], &kept, [&d_keys, &d_ranks])?;
    let found = [("keys", &keys), ("ranks", &ranks), ("the packed gradient", &packed), ("the ranks' gradient", &rank)];
    for ((what, found), expected) in found.into_iter().zip(expected) {
        if device.floats(found)? != expected {
            return wrong(format!("{what} differ"));
        }
    }
    Ok(0.0)
}

/// The keys of each row and KV head that do not expire in the row, in `slots` slots: ascending, behind a -1 for each
/// slot that is left over. Where there are fewer slots than such keys, the last keys take them.
fn kept_at_end(case: &Case, slots: usize) -> Vec<i32> {
    let seq_len = case.shape.seq_len;
    let mut places = Vec::new();
    for expire in case.expire.chunks_exact(seq_len) {
        let stays = (0..seq_len).filter(|&key| expire[key] as usize >= seq_len);
        let stays = stays.map(|key| key as i32).collect::<Vec<_>>();
        let last = &stays[stays.len().saturating_sub(slots)..];
        places.extend(vec![-1; slots - last.len()]);
        places.extend(last);
    }
    places
}

/// Sizes of a packed tensor, whose last heads are keys and values, and of its halo.
struct HaloSizes {
    seq_len: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    slots: usize,
}

impl HaloSizes {
    /// The halo of the keys at `places`, K and V then ranks, taken from the packed tensor and the ranks; and these with
    /// the halo's gradients added. Empty slots hold zeros, and their gradients are added to nothing.
    fn expected(&self, places: &[i32], [x, r]: [&Vec<f32>; 2], [dx, dr]: [&[f32]; 2]) -> [Vec<f32>; 4] {
        let &Self { seq_len, heads, kv_heads, head_dim, slots } = self;
        let (mut keys, mut ranks) = (vec![0.0; dx.len()], vec![0.0; dr.len()]);
        let (mut sums, mut rank_sums) = (x.clone(), r.clone());
        for (at, &place) in places.iter().enumerate() {
            let Ok(token) = usize::try_from(place) else {
                continue;
            };
            let (row, kv_head, slot) = (at / slots / kv_heads, at / slots % kv_heads, at % slots);
            // The key, then the value.
            for vector in [kv_head, kv_heads + kv_head] {
                let from = ((row * seq_len + token) * heads + heads - 2 * kv_heads + vector) * head_dim;
                let to = ((row * slots + slot) * 2 * kv_heads + vector) * head_dim;
                for column in 0..head_dim {
                    keys[to + column] = x[from + column];
                    sums[from + column] = round_bf16(x[from + column] + dx[to + column]);
                }
            }
            let from = (row * kv_heads + kv_head) * seq_len + token;
            ranks[at] = r[from];
            rank_sums[from] += dr[at];
        }
        [keys, ranks, sums, rank_sums]
    }
}

/// Compares every super-block's key list and its padding, and each query tile's window of list entries, with the CPU's.
fn compare(lists: &KeyLists, case: &Case, device: &dyn Device) -> Outcome {
    let (entries, lengths) = (device.ints(&lists.list)?, device.ints(&lists.list_len)?);
    let windows = device.ints(&lists.tile_window)?;
    let seq_len = case.shape.seq_len;
    let (blocks, capacity) = (lists.num_super_blocks(), lists.capacity());
    let tiles = seq_len.div_ceil(lists.tile_queries);
    for (row, expire) in case.expire.chunks_exact(seq_len).enumerate() {
        for block in 0..blocks {
            let expected = oracle::key_list(expire, block);
            let at = row * blocks + block;
            let length = lengths[at] as usize;
            if length > capacity {
                return wrong(format!("row {row}, block {block}: {length} entries, room for {capacity}"));
            }
            let (got, _) = entries[at * capacity * 2..].as_chunks::<2>();
            // Kernels read whole tiles of 128 entries, so the last tile is padded with a real key that no query sees.
            let padding = &got[length..length.next_multiple_of(128)];
            if padding.iter().any(|entry| *entry != [expected.entries[0][0], 0]) {
                return wrong(format!("the padding of row {row}, block {block} differs"));
            }
            if got[..length] != expected.entries {
                return wrong(format!("the list of row {row}, block {block} differs"));
            }
            let first_query = block * oracle::SUPER_BLOCK;
            let end = (first_query + oracle::SUPER_BLOCK).min(seq_len);
            for first in (first_query..end).step_by(lists.tile_queries) {
                let last = (first + lists.tile_queries).min(end) - 1;
                let at = (row * tiles + first / lists.tile_queries) * 2;
                if windows[at..at + 2] != oracle::tile_window(&expected, first, last) {
                    let words = format!("the tile window of row {row}, query {first} differs");
                    return wrong(words);
                }
            }
        }
    }
    Ok(0.0)
}
