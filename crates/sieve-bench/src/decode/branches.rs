//! Checks decoding of native sparse attention after a prefill, against f64 on the host: the compressed key and value of
//! each block that ends at the new token, and the outputs of the three branches.
use super::caches::{Key, NO_BIAS, NO_RANK, Token, TokenCheck, chosen_keys};
use crate::case::scaled_normals;
use crate::device::Device;
use crate::extent::Extent;
use crate::report::{Report, Wrong, wrong};
use sieve_core::{BlockChoice, NsaBlocks};
use sieve_kernels::{AttentionShape, CudaTensor, DType, DecodeScratch, DecodeStep, KvCache, NsaToken};
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
    let (shape, device) = (calls.shape, calls.device);
    let (batch, num_kv_heads, width) = (shape.batch, shape.num_kv_heads, shape.head_dim);
    let (rows, size, steps) = (batch * num_kv_heads, blocks.compress_block_size, 2 * blocks.compress_stride);
    let hidden = calls.random.one_of(&[24, width]);
    let mlp = has_mlp.then(|| [(); 2].map(|()| Mlp::draw(calls, [size, width, hidden])));
    // Rows of different lengths. The tail (the last keys of the compressed branch) and the window may have dropped all
    // tokens that the shortest row no longer reads.
    let lengths: Vec<usize> = (0..batch).map(|_| calls.random.below(300)).collect();
    let [shortest, longest] = [lengths.iter().min(), lengths.iter().max()].map(|len| *len.expect("a row"));
    let num_dropped = calls.random.below(shortest.saturating_sub(size) + 1);
    let window = calls.random.between(1, 100);
    let window_dropped = (shortest + 1).saturating_sub(window);
    let capacity = longest + steps + calls.random.between(1, 20);
    let mut keys = [(); 3].map(|()| -> Vec<Vec<Key>> {
        let drawn = |calls: &mut TokenCheck<'_>, len| (0..len).map(|_| calls.drawn_key(NO_BIAS, NO_RANK)).collect();
        (0..rows).map(|row| drawn(calls, lengths[row / num_kv_heads])).collect()
    });
    let placed = |keys: &[Vec<Key>], dropped: usize| -> Vec<Vec<(usize, Key)>> {
        keys.iter().map(|keys| keys[dropped..].iter().cloned().enumerate().collect()).collect()
    };
    let tail = calls.cache(capacity - num_dropped, &placed(&keys[0], num_dropped));
    let selected = calls.cache(capacity, &placed(&keys[1], 0));
    let recent = calls.cache(capacity - window_dropped, &placed(&keys[2], window_dropped));
    let room = blocks.num_compressed_blocks(capacity) + 1;
    let ended = |keys: &[Vec<Key>]| -> Vec<[Vec<Vec<f32>>; 2]> {
        let of_row = |keys: &Vec<Key>| {
            [0, 1].map(|which| {
                let vectors: Vec<&[f32]> =
                    keys.iter().map(|key| if which == 0 { &key.k[..] } else { &key.v }).collect();
                compressed(&vectors, blocks, mlp.as_ref().map(|mlp| &mlp[which]))
            })
        };
        keys.iter().map(of_row).collect()
    };
    let [on_k, on_v] = [0, 1].map(|which| {
        let mut values = vec![f32::NAN; rows * room * width];
        for (row, pair) in ended(&keys[0]).iter().enumerate() {
            for (c, x) in pair[which].iter().enumerate() {
                values[(row * room + c) * width..][..width].copy_from_slice(x);
            }
        }
        device.float(&values, &[batch, num_kv_heads, room, width], DType::BF16)
    });
    let of_blocks = KvCache { k: on_k, v: on_v };
    let num_selected = blocks.num_selected_blocks * blocks.select_block_size;
    let scratch = |most| DecodeScratch::new(&selected.k, shape, most);
    let scratch = [scratch(room)?, scratch(num_selected)?, scratch(window)?];
    for at in 0..steps {
        let tokens: [Token; 3] = [(); 3].map(|()| calls.token());
        for (keys, token) in keys.iter_mut().zip(&tokens) {
            for (row, keys) in keys.iter_mut().enumerate() {
                keys.push(calls.key_of(token, row, NO_BIAS, NO_RANK));
            }
        }
        let before = lengths.iter().map(|len| (len + at) as i32);
        let all = DecodeStep::new(longest + at, calls.scale());
        let near = DecodeStep {
            window: Some(window),
            max_length: longest + at - window_dropped,
            num_dropped: window_dropped,
            ..all
        };
        let start = device.int(&before.clone().map(|len| -len).collect::<Vec<_>>(), &[batch, 1]);
        let length = device.int(&before.collect::<Vec<_>>(), &[batch]);
        let weights = mlp.as_ref().map(|mlp| mlp.each_ref().map(|mlp| mlp.on_device.each_ref()));
        let token = NsaToken {
            branches: [&tokens[0].on, &tokens[1].on, &tokens[2].on],
            caches: [&of_blocks, &selected, &recent],
            tail: (&tail, num_dropped),
            mlp: weights,
            start: &start,
            blocks,
        };
        let o = token.decode(&length, [all, near], scratch.each_ref())?;
        let coarse = coarse_keys(calls, &of_blocks, &ended(&keys[0]), room)?;
        let of_row = device.floats(&o[0])?;
        let of_row = of_row.chunks_exact(shape.group_size() * width).zip(&coarse);
        let is_zero = |(o, keys): (&[f32], &Vec<Key>)| !keys.is_empty() || o.iter().all(|x| *x == 0.0);
        if !of_row.clone().all(is_zero) {
            return wrong("the compressed branch is not zero before a block has ended");
        }
        calls.judge(&o[0], &tokens[0], &coarse)?;
        let fine: Vec<Vec<Key>> = (0..rows)
            .map(|row| {
                let group = shape.group_size() * width;
                let means = coarse[row].iter().map(|key| key.k.clone()).collect();
                let q = &tokens[0].q[row * group..][..group];
                chosen_keys(&keys[1][row], means, q, BlockChoice::nsa(blocks), calls.scale())
            })
            .collect();
        calls.judge(&o[1], &tokens[1], &fine)?;
        let near: Vec<Vec<Key>> =
            keys[2].iter().map(|keys| keys[keys.len().saturating_sub(window)..].to_vec()).collect();
        calls.judge(&o[2], &tokens[2], &near)?;
    }
    Ok(())
}

/// The compressed keys and values that the device holds, for each row and KV head, once they agree with the host's
/// (`ended`). The caller compares attention and choice over these, so that their rounding does not count twice.
fn coarse_keys(
    calls: &mut TokenCheck<'_>,
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
            Key { k: of(0), v: of(1), ..calls.drawn_key(NO_BIAS, NO_RANK) }
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
