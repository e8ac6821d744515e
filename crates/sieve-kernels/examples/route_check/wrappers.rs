//! Every attention wrapper against the host, on shapes that are no multiple of any tile.
use super::host::{self, Sizes};
use super::{Outcomes, download, download_ints, scrambled, upload, upload_ints};
use burn::tensor::DType;
use burn_cuda::CudaDevice;
use sieve_kernels::{
    AttentionGradients, AttentionResult, AttentionShape, CudaTensor, DecodeScratch, DecodeStep,
    DmaSlots, KernelError, KvCache, Qkv, ScoreBias, SumOrder, TILE_QUERIES, attention_backward,
    attention_decode, attention_forward, dma_attention_backward, dma_attention_forward, dma_decode,
    dma_lists, dma_scores, dma_select, oracle, selection_of_expire,
};

/// bf16 keeps 8 bits; sums of a few hundred rounded products stay within this share of the largest value.
const BF16_TOLERANCE: f64 = 0.02;

/// One call's inputs on both sides.
struct Case {
    sizes: Sizes,
    scale: f32,
    qkv_host: Vec<f32>,
    d_o_host: Vec<f32>,
    starts: Vec<i32>,
    ends: Vec<i32>,
    qkv: CudaTensor,
    d_o: CudaTensor,
    doc_start: CudaTensor,
    doc_end: CudaTensor,
}

impl Case {
    fn new(sizes: Sizes, device: &CudaDevice) -> Self {
        let Sizes {
            batch,
            seq_len,
            num_heads,
            head_dim,
            ..
        } = sizes;
        let (mut starts, mut ends) = (vec![], vec![]);
        for row in 0..batch {
            // Three documents a row, at other places in each, the first of one token.
            let cuts = [0, 1, seq_len / 3 + row, seq_len];
            for pair in cuts.windows(2) {
                starts.extend(vec![pair[0] as i32; pair[1] - pair[0]]);
                ends.extend(vec![pair[1] as i32; pair[1] - pair[0]]);
            }
        }
        let shape = [batch, seq_len, sizes.packed_heads(), head_dim];
        let seed = (seq_len * 1000 + head_dim) as u64;
        let qkv = upload(
            &scrambled(shape.iter().product(), seed),
            shape,
            DType::BF16,
            device,
        );
        let out = [batch, seq_len, num_heads, head_dim];
        let d_o = upload(
            &scrambled(out.iter().product(), seed + 1),
            out,
            DType::BF16,
            device,
        );
        Self {
            sizes,
            // Larger than 1/sqrt(d), so that the softmax is not flat.
            scale: 2.0 / (head_dim as f32).sqrt(),
            // What the GPU really holds, after rounding.
            qkv_host: download(&qkv),
            d_o_host: download(&d_o),
            doc_start: upload_ints(&starts, [batch, seq_len], device),
            doc_end: upload_ints(&ends, [batch, seq_len], device),
            starts,
            ends,
            qkv,
            d_o,
        }
    }

    fn packed(&self) -> Qkv {
        Qkv::packed(&self.qkv, self.sizes.num_heads, self.sizes.num_kv_heads)
    }

    fn token(&self, batch: usize, position: usize) -> usize {
        batch * self.sizes.seq_len + position
    }

    fn shape(&self) -> AttentionShape {
        let Sizes {
            batch,
            seq_len,
            num_heads,
            num_kv_heads,
            head_dim,
        } = self.sizes;
        AttentionShape {
            batch,
            seq_len,
            num_heads,
            num_kv_heads,
            head_dim,
            head_dim_v: head_dim,
        }
    }
}

pub(crate) fn check(outcomes: &mut Outcomes, device: &CudaDevice, quick: bool) {
    let sizes = |batch, seq_len, num_heads, num_kv_heads, head_dim| Sizes {
        batch,
        seq_len,
        num_heads,
        num_kv_heads,
        head_dim,
    };
    let mut shapes = vec![sizes(2, 183, 4, 2, 64), sizes(1, 203, 2, 1, 128)];
    if !quick {
        shapes.extend([
            sizes(2, 67, 3, 3, 16),
            sizes(1, 131, 8, 1, 32),
            sizes(1, 99, 6, 2, 96),
            sizes(1, 5, 2, 2, 128),
            sizes(1, 71, 2, 1, 256),
            sizes(1, 2100, 2, 1, 64),
        ]);
    }
    for sizes in shapes {
        let case = Case::new(sizes, device);
        let Sizes {
            batch,
            seq_len,
            num_heads,
            num_kv_heads,
            head_dim,
        } = sizes;
        let name = |what: &str| {
            format!("{what} {batch}x{seq_len} h{num_heads}/{num_kv_heads} d{head_dim}")
        };
        for (what, window) in [("dense", None), ("window 40", Some(40))] {
            outcomes.record(&name(what), dense(&case, window, None));
        }
        let bias = scrambled(batch * num_kv_heads * seq_len, 77);
        let bias = upload(&bias, [batch, num_kv_heads, seq_len], DType::F32, device);
        outcomes.record(&name("dense with bias"), dense(&case, None, Some(&bias)));
        for keep in [seq_len / 5 + 1, 2 * seq_len] {
            outcomes.record(&name(&format!("dma w {keep}")), dma(&case, keep, device));
        }
        outcomes.record(&name("decode dense"), decode(&case, device));
        outcomes.record(
            &name("decode dma"),
            decode_dma(&case, seq_len / 5 + 1, device),
        );
    }
}

fn text(error: KernelError) -> String {
    error.to_string()
}

/// Names each part's relative error; an error when one is over the tolerance.
fn judge(parts: &[(&str, Result<f64, String>)]) -> Result<String, String> {
    let mut notes = Vec::new();
    let mut good = true;
    for (name, gap) in parts {
        match gap {
            Ok(gap) => {
                // `!(<=)`, so that a NaN fails.
                good &= *gap <= BF16_TOLERANCE;
                notes.push(format!("{name} {gap:.1e}"));
            }
            Err(reason) => {
                good = false;
                notes.push(format!("{name}: {reason}"));
            }
        }
    }
    if good {
        Ok(notes.join(" "))
    } else {
        Err(notes.join(" "))
    }
}

/// Both orders of sums against one reference; the fixed order twice, which must be bit-equal.
fn dense(case: &Case, window: Option<usize>, bias: Option<&CudaTensor>) -> Result<String, String> {
    let Sizes {
        batch,
        seq_len,
        num_heads,
        num_kv_heads,
        ..
    } = case.sizes;
    let qkv = case.packed();
    let result =
        attention_forward(&qkv, &case.doc_start, window, case.scale, bias).map_err(text)?;
    let bias_host = bias.map_or_else(|| vec![0.0; batch * num_kv_heads * seq_len], download);
    let reach = window.unwrap_or(seq_len);
    let expected = host::attention(
        case.sizes,
        &case.qkv_host,
        &bias_host,
        &case.d_o_host,
        f64::from(case.scale),
        |b, _, i, j| j <= i && j + reach > i && j as i32 >= case.starts[case.token(b, i)],
    );
    let backward = |order| {
        let dqkv = case.qkv.nan_contiguous(case.qkv.shape(), DType::BF16);
        let grads = Qkv::packed(&dqkv, num_heads, num_kv_heads);
        let (d_o, softmax_scale) = (&case.d_o, case.scale);
        let call = AttentionGradients {
            qkv: &qkv,
            result: &result,
            d_o,
            grads: &grads,
            softmax_scale,
            order,
        };
        let dbias = attention_backward(call, [&case.doc_start, &case.doc_end], window, bias)
            .map_err(text)?;
        Ok((download(&dqkv), dbias.map(|dbias| download(&dbias))))
    };
    judge_gradients(&result, &expected, backward)
}

fn dma(case: &Case, keep: usize, device: &CudaDevice) -> Result<String, String> {
    let Sizes {
        batch,
        seq_len,
        num_heads,
        num_kv_heads,
        ..
    } = case.sizes;
    let rows = batch * num_kv_heads;
    // Scores on a coarse grid, so that there are ties.
    let z: Vec<f32> = scrambled(rows * seq_len, 5)
        .into_iter()
        .map(|z| (z * 20.0).round() / 20.0)
        .collect();
    let z_gpu = upload(&z, [batch, num_kv_heads, seq_len], DType::F32, device);
    let selection = dma_select(&z_gpu, &case.doc_start, &case.doc_end, keep, 0).map_err(text)?;
    let expire: Vec<Vec<i32>> = (0..rows)
        .map(|row| {
            let tokens = case.token(row / num_kv_heads, 0)..case.token(row / num_kv_heads, seq_len);
            let scores = &z[row * seq_len..(row + 1) * seq_len];
            oracle::expire(
                scores,
                &case.starts[tokens.clone()],
                &case.ends[tokens],
                keep,
            )
        })
        .collect();
    if download_ints(&selection.expire) != expire.concat() {
        return Err("expire differs from the heap".into());
    }
    let lists =
        dma_lists(&selection, &case.doc_start, &case.doc_end, TILE_QUERIES).map_err(text)?;
    compare_lists(&lists, &expire)?;
    let rebuilt = selection_of_expire(&selection.expire, &case.doc_start, keep).map_err(text)?;
    let rebuilt =
        dma_lists(&rebuilt, &case.doc_start, &case.doc_end, TILE_QUERIES).map_err(text)?;
    compare_lists(&rebuilt, &expire).map_err(|e| format!("from expire alone: {e}"))?;

    let qkv = case.packed();
    let result = dma_attention_forward(&qkv, &z_gpu, &lists, case.scale).map_err(text)?;
    let expected = host::attention(
        case.sizes,
        &case.qkv_host,
        &z,
        &case.d_o_host,
        f64::from(case.scale),
        |b, kv, i, j| {
            let here = j as i32 >= case.starts[case.token(b, i)];
            here && j <= i && (i as i32) < expire[b * num_kv_heads + kv][j]
        },
    );
    let backward = |order| {
        let dqkv = case.qkv.nan_contiguous(case.qkv.shape(), DType::BF16);
        let grads = Qkv::packed(&dqkv, num_heads, num_kv_heads);
        let (d_o, softmax_scale) = (&case.d_o, case.scale);
        let call = AttentionGradients {
            qkv: &qkv,
            result: &result,
            d_o,
            grads: &grads,
            softmax_scale,
            order,
        };
        let ddelta = dma_attention_backward(call, &z_gpu, &lists).map_err(text)?;
        Ok((download(&dqkv), Some(download(&ddelta))))
    };
    judge_gradients(&result, &expected, backward)
}

/// What a backward run gives: packed gradients, and that of the bias.
type Gradients = (Vec<f32>, Option<Vec<f32>>);

fn judge_gradients(
    result: &AttentionResult,
    expected: &host::Reference,
    backward: impl Fn(SumOrder) -> Result<Gradients, String>,
) -> Result<String, String> {
    let mut parts = vec![
        ("o", host::relative_gap(&download(&result.o), &expected.o)),
        (
            "lse",
            host::relative_gap(&download(&result.lse), &expected.lse),
        ),
    ];
    let (dqkv, dbias) = backward(SumOrder::Any)?;
    parts.push(("dqkv", host::relative_gap(&dqkv, &expected.dqkv)));
    parts.extend(dbias.map(|dbias| ("dbias", host::relative_gap(&dbias, &expected.ddelta))));
    let fixed = backward(SumOrder::Fixed)?;
    parts.push(("fixed dqkv", host::relative_gap(&fixed.0, &expected.dqkv)));
    parts.extend(
        fixed
            .1
            .as_ref()
            .map(|dbias| ("fixed dbias", host::relative_gap(dbias, &expected.ddelta))),
    );
    if fixed != backward(SumOrder::Fixed)? {
        parts.push(("fixed", Err("two runs differ".into())));
    }
    judge(&parts)
}

fn compare_lists(lists: &sieve_kernels::KeyLists, expire: &[Vec<i32>]) -> Result<(), String> {
    let (entries, lengths) = (download_ints(&lists.list), download_ints(&lists.list_len));
    let entering = download_ints(&lists.num_entering);
    let windows = download_ints(&lists.tile_window);
    for (row, expire) in expire.iter().enumerate() {
        for block in 0..lists.num_super_blocks() {
            let expected = oracle::key_list(expire, block);
            let index = row * lists.num_super_blocks() + block;
            let length = lengths[index] as usize;
            let got: Vec<[i32; 2]> = entries[index * lists.capacity() * 2..][..length * 2]
                .chunks_exact(2)
                .map(|pair| [pair[0], pair[1]])
                .collect();
            if got != expected.entries || entering[index] as usize != expected.num_entering {
                return Err(format!(
                    "list of row {row}, block {block} differs from the oracle"
                ));
            }
            let tiles = expire.len().div_ceil(lists.tile_queries);
            let first_query = block * oracle::SUPER_BLOCK;
            let last_query = (first_query + oracle::SUPER_BLOCK).min(expire.len());
            for first in (first_query..last_query).step_by(lists.tile_queries) {
                let last = (first + lists.tile_queries).min(last_query) - 1;
                let at = (row * tiles + first / lists.tile_queries) * 2;
                if windows[at..at + 2] != oracle::tile_window(&expected, first, last) {
                    return Err(format!(
                        "tile window of row {row}, query {first} differs from the oracle"
                    ));
                }
            }
        }
    }
    Ok(())
}

/// Tokens of the packed tensor, one step after the other; documents are ignored, as a decoder has one.
fn one_token(case: &Case, position: usize, device: &CudaDevice) -> CudaTensor {
    let Sizes {
        batch, head_dim, ..
    } = case.sizes;
    let heads = case.sizes.packed_heads();
    let rows: Vec<f32> = (0..batch)
        .flat_map(|b| case.qkv_host[case.sizes.at(b, position, 0)..][..heads * head_dim].to_vec())
        .collect();
    upload(&rows, [batch, 1, heads, head_dim], DType::BF16, device)
}

const DECODED_TOKENS: usize = 60;

fn decode(case: &Case, device: &CudaDevice) -> Result<String, String> {
    let Sizes {
        batch,
        num_heads,
        num_kv_heads,
        head_dim,
        ..
    } = case.sizes;
    let tokens = DECODED_TOKENS.min(case.sizes.seq_len);
    let cache = KvCache::new(&case.qkv, &case.shape(), tokens);
    let scratch = DecodeScratch::new(&case.qkv, case.shape(), tokens).map_err(text)?;
    let expected = decode_reference(case, tokens, None);
    let mut worst = Ok(0.0f64);
    for position in 0..tokens {
        let packed = one_token(case, position, device);
        let qkv = Qkv::packed(&packed, num_heads, num_kv_heads);
        let length = upload_ints(&vec![position as i32; batch], [batch], device);
        let step = DecodeStep {
            window: None,
            softmax_scale: case.scale,
            max_length: position,
        };
        let o = attention_decode(&qkv, &cache, &length, step, &scratch).map_err(text)?;
        let gap = host::relative_gap(
            &download(&o),
            &rows_of(&expected, case, position, num_heads * head_dim),
        );
        worst = worst.and_then(|w| gap.map(|g| w.max(g)));
    }
    judge(&[("o", worst)])
}

fn decode_dma(case: &Case, keep: usize, device: &CudaDevice) -> Result<String, String> {
    let Sizes {
        batch,
        num_heads,
        num_kv_heads,
        head_dim,
        ..
    } = case.sizes;
    let tokens = DECODED_TOKENS.min(case.sizes.seq_len);
    let keep = keep.min(tokens / 2 + 1);
    let w_dt: Vec<f32> = scrambled(num_kv_heads * head_dim * num_kv_heads, 9)
        .iter()
        .map(|w| w * 0.2)
        .collect();
    let w_dt = upload(
        &w_dt,
        [num_kv_heads * head_dim, num_kv_heads],
        DType::F32,
        device,
    );
    let a = upload(&vec![0.7; num_kv_heads], [num_kv_heads], DType::F32, device);
    let all = dma_scores(&case.packed(), &w_dt, &a, ScoreBias::Exp).map_err(text)?;
    let z = download(&all.z);
    let slots = DmaSlots::new(&case.qkv, &case.shape(), keep);
    let scratch = DecodeScratch::new(&case.qkv, case.shape(), keep).map_err(text)?;
    let expected = decode_reference(case, tokens, Some((&z, &download(&all.delta), keep)));
    let mut worst = Ok(0.0f64);
    for position in 0..tokens {
        let packed = one_token(case, position, device);
        let qkv = Qkv::packed(&packed, num_heads, num_kv_heads);
        let length = upload_ints(&vec![position as i32; batch], [batch], device);
        let here: Vec<f32> = (0..batch * num_kv_heads)
            .map(|row| z[row * case.sizes.seq_len + position])
            .collect();
        let here = upload(&here, [batch, num_kv_heads], DType::F32, device);
        let o = dma_decode(
            &qkv,
            &here,
            &slots,
            &length,
            case.scale,
            ScoreBias::Exp,
            &scratch,
        )
        .map_err(text)?;
        let gap = host::relative_gap(
            &download(&o),
            &rows_of(&expected, case, position, num_heads * head_dim),
        );
        worst = worst.and_then(|w| gap.map(|g| w.max(g)));
    }
    judge(&[("o", worst)])
}

/// The full forward pass over the first tokens as one document, dense or DMA.
fn decode_reference(case: &Case, tokens: usize, dma: Option<(&[f32], &[f32], usize)>) -> Vec<f32> {
    let Sizes {
        batch,
        seq_len,
        num_kv_heads,
        ..
    } = case.sizes;
    let (starts, ends) = (vec![0; tokens], vec![tokens as i32; tokens]);
    let expire: Vec<Vec<i32>> = (0..batch * num_kv_heads)
        .map(|row| match dma {
            Some((z, _, keep)) => {
                oracle::expire(&z[row * seq_len..][..tokens], &starts, &ends, keep)
            }
            None => ends.clone(),
        })
        .collect();
    let zeros = vec![0.0; batch * num_kv_heads * seq_len];
    let delta = dma.map_or(zeros.as_slice(), |(_, delta, _)| delta);
    let reference = host::attention(
        case.sizes,
        &case.qkv_host,
        delta,
        &case.d_o_host,
        f64::from(case.scale),
        |b, kv, i, j| i < tokens && j <= i && (i as i32) < expire[b * num_kv_heads + kv][j],
    );
    reference.o
}

fn rows_of(all: &[f32], case: &Case, position: usize, width: usize) -> Vec<f32> {
    let row = |b| &all[case.token(b, position) * width..][..width];
    (0..case.sizes.batch)
        .flat_map(|b| row(b).to_vec())
        .collect()
}
