//! Checks decoding of native sparse attention after a prefill, against f64 on the host: the compressed key and value of
//! each block that ends at the new token, and the outputs of the three branches.
use super::caches::{Key, NO_BIAS, NO_RANK, Token, TokenCheck, chosen_keys};
use crate::case::scaled_normals;
use crate::device::Device;
use crate::extent::Extent;
use crate::report::{Report, Wrong, wrong};
use sieve_core::{BlockChoice, NsaBlocks};
use sieve_kernels::{AttentionShape, CudaTensor, DType, DecodeScratch, DecodeStep, KernelError, KvCache, NsaToken};
use sieve_testing::{Random, round_bf16};

/// Checks some random calls: every second one compresses blocks by an MLP, the others by their mean.
pub(super) fn check(report: &mut Report, device: &dyn Device, extent: &Extent) {
    let mut random = Random(extent.seed);
    for at in 0..extent.few().max(4) {
        let (kv_heads, group) = (random.between(1, 3), random.one_of(&[1, 2, 5]));
        let width = [64, 128][at / 2 % 2];
        let shape = AttentionShape::new(random.between(1, 3), 1, [kv_heads * group, kv_heads], [width; 2]);
        let seed = random.between(0, 1 << 30) as u64;
        let blocks = NsaBlocks::of(random.one_of(&[[32, 16, 64, 4], [16, 16, 32, 3], [8, 4, 16, 5]]));
        let magnitude = 1.0;
        let mut calls = TokenCheck::new(device, shape, magnitude, seed);
        let has_mlp = at % 2 == 0;
        let outcome = decode(&mut calls, blocks, has_mlp).map(|()| calls.worst);
        let label = format!("{shape:?} {blocks:?} MLP {has_mlp} seed {seed}");
        report.add("nsa token", "kernel", &label, outcome);
    }
}

/// The compression MLP of a block's keys, or of its values: position embeddings, then two weight matrices.
struct Mlp {
    on_device: [CudaTensor; 3],
    on_host: [Vec<f32>; 3],
}

impl Mlp {
    fn draw(calls: &mut TokenCheck<'_>, [size, width, hidden]: [usize; 3]) -> Self {
        let shapes = [[size, width], [hidden, size * width], [width, hidden]];
        let on_host = shapes
            .map(|[rows, columns]| scaled_normals(&mut calls.random, rows * columns, 1.0 / (columns as f32).sqrt()));
        let on_device = [0, 1, 2].map(|n| calls.device.float(&on_host[n], &shapes[n], DType::BF16));
        Self { on_device, on_host }
    }

    /// The compressed key or value of a block, rounded to bf16 where the kernel rounds.
    fn of(&self, block: &[f32]) -> Vec<f32> {
        let [positions, up, down] = &self.on_host;
        let x: Vec<f32> = block.iter().zip(positions).map(|(x, p)| round_bf16(x + p)).collect();
        let times = |x: &[f32], w: &[f32]| -> Vec<f32> {
            let dot = |w: &[f32]| w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>();
            w.chunks_exact(x.len()).map(|row| round_bf16(dot(row) as f32)).collect()
        };
        let hidden: Vec<f32> = times(&x, up).into_iter().map(|x| x.max(0.0)).collect();
        times(&hidden, down)
    }
}

/// The compressed keys or values of all blocks of one row and KV head that have ended; means where `mlp` is `None`.
fn compressed(tokens: &[&[f32]], blocks: NsaBlocks, mlp: Option<&Mlp>) -> Vec<Vec<f32>> {
    let (size, stride) = (blocks.compress_block_size, blocks.compress_stride);
    let of_block = |c: usize| {
        let block = &tokens[c * stride..][..size];
        match mlp {
            Some(mlp) => mlp.of(&block.concat()),
            None => {
                let mean = |at: usize| block.iter().map(|x| f64::from(x[at])).sum::<f64>() / size as f64;
                (0..block[0].len()).map(|at| round_bf16(mean(at) as f32)).collect()
            }
        }
    };
    (0..blocks.num_compressed_blocks(tokens.len())).map(of_block).collect()
}

/// Prefills the three branches' caches, decodes some tokens, and compares each token's compressed keys and values and
/// the branches' outputs with f64.
fn decode(calls: &mut TokenCheck<'_>, blocks: NsaBlocks, has_mlp: bool) -> Result<(), Wrong> {
    let width = calls.shape.head_dim;
    let hidden = calls.random.one_of(&[24, width]);
    let mlp = has_mlp.then(|| [(); 2].map(|()| Mlp::draw(calls, [blocks.compress_block_size, width, hidden])));
    let text = Text::draw(calls, blocks);
    let mut keys = text.draw_keys(calls);
    let caches = Caches::prefilled(calls, &text, &keys, mlp.as_ref());
    let scratch = caches.scratch(calls.shape, &text)?;
    for at in 0..text.steps {
        let tokens: [Token; 3] = [(); 3].map(|()| calls.token());
        for (keys, token) in keys.iter_mut().zip(&tokens) {
            for (row, keys) in keys.iter_mut().enumerate() {
                keys.push(calls.key_of(token, row, NO_BIAS, NO_RANK));
            }
        }
        let o = caches.decode(calls, &text, &tokens, at, mlp.as_ref(), scratch.each_ref())?;
        let coarse = coarse_keys(calls, &caches.compressed, &ended(&keys[0], blocks, mlp.as_ref()), text.room())?;
        judge(calls, &text, &o, &tokens, &keys, &coarse)?;
    }
    Ok(())
}

/// Sizes of the texts that a check decodes, and of their caches.
struct Text {
    blocks: NsaBlocks,
    /// Tokens of each prompt, one for each row of the batch; the shortest and the longest prompt.
    lengths: Vec<usize>,
    shortest: usize,
    longest: usize,
    /// Tokens that are decoded after the prompts.
    steps: usize,
    /// First tokens that the tail (the last keys of the compressed branch) has dropped: no later block begins there.
    tail_dropped: usize,
    /// Keys that a query of the window branch sees.
    window: usize,
    /// Tokens of a text for which there is room.
    capacity: usize,
}

impl Text {
    /// Draws prompts of fewer than 300 tokens, how much of them the caches dropped, and spare room; two strides of the
    /// compressed branch are decoded behind them.
    fn draw(calls: &mut TokenCheck<'_>, blocks: NsaBlocks) -> Self {
        let (size, steps) = (blocks.compress_block_size, 2 * blocks.compress_stride);
        let lengths: Vec<usize> = (0..calls.shape.batch).map(|_| calls.random.below(300)).collect();
        let [shortest, longest] = [lengths.iter().min(), lengths.iter().max()].map(|len| *len.expect("a row"));
        let tail_dropped = calls.random.below(shortest.saturating_sub(size) + 1);
        let window = calls.random.between(1, 100);
        let capacity = longest + steps + calls.random.between(1, 20);
        Self { blocks, lengths, shortest, longest, steps, tail_dropped, window, capacity }
    }

    /// First tokens that the window branch's cache has dropped: even the shortest text no longer reads them.
    fn window_dropped(&self) -> usize {
        (self.shortest + 1).saturating_sub(self.window)
    }

    /// Compressed keys of a row for which there is room.
    fn room(&self) -> usize {
        self.blocks.num_compressed_blocks(self.capacity) + 1
    }

    /// The prompts' keys in the compressed, the selected and the window branch, for each row and KV head.
    fn draw_keys(&self, calls: &mut TokenCheck<'_>) -> BranchKeys {
        let num_kv_heads = calls.shape.num_kv_heads;
        let rows = calls.shape.batch * num_kv_heads;
        [(); 3].map(|()| {
            let drawn = |calls: &mut TokenCheck<'_>, len| (0..len).map(|_| calls.drawn_key(NO_BIAS, NO_RANK)).collect();
            (0..rows).map(|row| drawn(calls, self.lengths[row / num_kv_heads])).collect()
        })
    }
}

/// All keys so far of the compressed, the selected and the window branch, for each row and KV head.
type BranchKeys = [Vec<Vec<Key>>; 3];

/// The caches of the three branches on a device.
struct Caches {
    /// Compressed keys and values.
    compressed: KvCache,
    /// The last tokens' keys and values of the compressed branch, from which the next block is compressed.
    tail: KvCache,
    selected: KvCache,
    window: KvCache,
}

impl Caches {
    /// The caches as a prefill of the prompts leaves them.
    fn prefilled(calls: &TokenCheck<'_>, text: &Text, keys: &BranchKeys, mlp: Option<&[Mlp; 2]>) -> Self {
        let placed = |keys: &[Vec<Key>], dropped: usize| -> Vec<Vec<(usize, Key)>> {
            keys.iter().map(|keys| keys[dropped..].iter().cloned().enumerate().collect()).collect()
        };
        let cache = |keys, dropped| calls.cache(text.capacity - dropped, &placed(keys, dropped));
        let (shape, room) = (calls.shape, text.room());
        let width = shape.head_dim;
        let ended = ended(&keys[0], text.blocks, mlp);
        let [k, v] = [0, 1].map(|which| {
            let mut values = vec![f32::NAN; ended.len() * room * width];
            for (row, pair) in ended.iter().enumerate() {
                for (c, x) in pair[which].iter().enumerate() {
                    values[(row * room + c) * width..][..width].copy_from_slice(x);
                }
            }
            calls.device.float(&values, &[shape.batch, shape.num_kv_heads, room, width], DType::BF16)
        });
        Self {
            compressed: KvCache { k, v },
            tail: cache(&keys[0], text.tail_dropped),
            selected: cache(&keys[1], 0),
            window: cache(&keys[2], text.window_dropped()),
        }
    }

    /// Buffers of the three branches.
    fn scratch(&self, shape: AttentionShape, text: &Text) -> Result<[DecodeScratch; 3], KernelError> {
        let num_selected = text.blocks.num_selected_blocks * text.blocks.select_block_size;
        let scratch = |most| DecodeScratch::new(&self.selected.k, shape, most);
        Ok([scratch(text.room())?, scratch(num_selected)?, scratch(text.window)?])
    }

    /// The branches' outputs for the token with `at` decoded tokens before it.
    fn decode(
        &self,
        calls: &TokenCheck<'_>,
        text: &Text,
        tokens: &[Token; 3],
        at: usize,
        mlp: Option<&[Mlp; 2]>,
        scratch: [&DecodeScratch; 3],
    ) -> Result<[CudaTensor; 3], KernelError> {
        let batch = calls.shape.batch;
        let before: Vec<i32> = text.lengths.iter().map(|len| (len + at) as i32).collect();
        let start: Vec<i32> = before.iter().map(|len| -len).collect();
        let all = DecodeStep::new(text.longest + at, calls.scale());
        let num_dropped = text.window_dropped();
        let max_length = text.longest + at - num_dropped;
        let near = DecodeStep { window: Some(text.window), max_length, num_dropped, ..all };
        let token = NsaToken {
            branches: [&tokens[0].on, &tokens[1].on, &tokens[2].on],
            caches: [&self.compressed, &self.selected, &self.window],
            tail: (&self.tail, text.tail_dropped),
            mlp: mlp.map(|mlp| mlp.each_ref().map(|mlp| mlp.on_device.each_ref())),
            start: &calls.device.int(&start, &[batch, 1]),
            blocks: text.blocks,
        };
        token.decode(&calls.device.int(&before, &[batch]), [all, near], scratch)
    }
}

/// The compressed keys and values of the blocks that have ended, for each row and KV head.
fn ended(keys: &[Vec<Key>], blocks: NsaBlocks, mlp: Option<&[Mlp; 2]>) -> Vec<[Vec<Vec<f32>>; 2]> {
    let of_row = |keys: &Vec<Key>| {
        [0, 1].map(|which| {
            let vectors: Vec<&[f32]> = keys.iter().map(|key| if which == 0 { &key.k[..] } else { &key.v }).collect();
            compressed(&vectors, blocks, mlp.map(|mlp| &mlp[which]))
        })
    };
    keys.iter().map(of_row).collect()
}

/// Compares the three branches' outputs with attention over the keys that each sees; `coarse` are the compressed keys.
fn judge(
    calls: &mut TokenCheck<'_>,
    text: &Text,
    o: &[CudaTensor; 3],
    tokens: &[Token; 3],
    keys: &BranchKeys,
    coarse: &[Vec<Key>],
) -> Result<(), Wrong> {
    let group = calls.shape.group_size() * calls.shape.head_dim;
    let of_compressed = calls.device.floats(&o[0])?;
    let is_zero = |(o, keys): (&[f32], &Vec<Key>)| !keys.is_empty() || o.iter().all(|x| *x == 0.0);
    if !of_compressed.chunks_exact(group).zip(coarse).all(is_zero) {
        return wrong("the compressed branch is not zero before a block has ended");
    }
    calls.judge(&o[0], &tokens[0], coarse)?;
    // The compressed branch's queries choose the blocks that the selected branch reads.
    let choice = BlockChoice::nsa(text.blocks);
    let fine: Vec<Vec<Key>> = coarse
        .iter()
        .enumerate()
        .map(|(row, coarse)| {
            let means = coarse.iter().map(|key| key.k.clone()).collect();
            chosen_keys(&keys[1][row], means, &tokens[0].q[row * group..][..group], choice, calls.scale())
        })
        .collect();
    calls.judge(&o[1], &tokens[1], &fine)?;
    let in_window = |keys: &Vec<Key>| keys[keys.len().saturating_sub(text.window)..].to_vec();
    calls.judge(&o[2], &tokens[2], &keys[2].iter().map(in_window).collect::<Vec<_>>())
}

/// The compressed keys and values that the device holds, for each row and KV head, once they agree with the host's
/// (`ended`). The caller compares attention and choice over these, so that their rounding does not count twice.
fn coarse_keys(
    calls: &TokenCheck<'_>,
    of_blocks: &KvCache,
    ended: &[[Vec<Vec<f32>>; 2]],
    room: usize,
) -> Result<Vec<Vec<Key>>, Wrong> {
    let (device, width) = (calls.device, calls.shape.head_dim);
    let got = [device.floats(&of_blocks.k)?, device.floats(&of_blocks.v)?];
    let mut coarse: Vec<Vec<Key>> = Vec::new();
    for (row, pair) in ended.iter().enumerate() {
        let of_row = (0..pair[0].len()).map(|c| {
            let of = |which: usize| got[which][(row * room + c) * width..][..width].to_vec();
            Key { k: of(0), v: of(1), bias: NO_BIAS, rank: NO_RANK }
        });
        let of_row: Vec<Key> = of_row.collect();
        for (c, key) in of_row.iter().enumerate() {
            for (name, got, expected) in [("key", &key.k, &pair[0][c]), ("value", &key.v, &pair[1][c])] {
                let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 0.01 + b.abs() / 64.0;
                if !got.iter().zip(expected).all(near) {
                    return wrong(format!("compressed {name} {c} of row {row} is {got:?}, expected {expected:?}"));
                }
            }
        }
        coarse.push(of_row);
    }
    Ok(coarse)
}
