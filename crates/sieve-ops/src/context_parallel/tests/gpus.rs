//! Context parallelism on four GPUs against whole rows on one GPU. CI has no GPUs; run it on a host with four:
//!
//! ```text
//! cargo test --release -p sieve-ops four_gpus -- --ignored --nocapture
//! ```
//!
//! Each GPU has a process, as in training. The test starts itself four times, with the part's number in the environment
//! variable [`PART`].
use super::{attend, bounds, layer};
use crate::context_parallel::attend::DmaParts;
use crate::context_parallel::{backward, forward};
use crate::tensors::{Float, primitive, tensor};
use crate::{AttentionCall, AttentionSpec, ContextParallel, Documents, RankGroup};
use burn::tensor::{DType, Int, Tensor, TensorData};
use sieve_core::{DmaBias, DmaRecency, DmaShape, KeepOLow};
use sieve_cuda::Cuda;
use sieve_kernels::{CudaReport, KernelCache, KernelPolicy, NcclGroup, NcclStream};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const NAME: &str = "context_parallel::tests::gpus::four_gpus_choose_the_keys_that_one_chooses";
/// Environment variable with the number of the part that a process computes.
const PART: &str = "SIEVE_TEST_PART";
/// Environment variable with the folder for the parts' results.
const FOLDER: &str = "SIEVE_TEST_FOLDER";
const PARTS: usize = 4;
/// Tokens of a part.
const LEN: usize = 32_768;
/// Tokens of the whole row.
const ROW: usize = PARTS * LEN;
/// Columns of a head.
const WIDTH: usize = 128;
/// Keys that a DMA query sees at most.
const KEPT: usize = 2048;
const SPEC: AttentionSpec = AttentionSpec {
    num_heads: 8,
    num_kv_heads: 4,
    softmax_scale: 0.088_388_347_648_318_45,
    window_size: None,
    far: None,
    policy: KernelPolicy::DEFAULT,
};
/// Value of `expire` for a key that no query of the part sees.
const GONE: i32 = -1;
/// Tolerance of bf16 results whose sums have another order: relative error in the Euclidean norm.
const TOLERANCE: f64 = 1e-2;

/// One kind of attention (DMA where `dma` is set, else dense), the size of DMA's gates A, and the lengths of the
/// documents.
struct Case {
    name: &'static str,
    dma: Option<DmaShape>,
    a: f32,
    documents: Vec<usize>,
}

/// Dense attention and both forms of DMA, in rows of one document and of many.
fn cases() -> Vec<Case> {
    let published = DmaShape::published(KEPT);
    let recent =
        DmaShape { bias: DmaBias::Linear, recency: DmaRecency::Slope, local_window_size: KEPT / 8, ..published };
    // Documents begin and end at the borders of parts, before and after them; some have one token, some three parts.
    let cut = [LEN - 1, 1, 1, LEN - 9, 8, LEN - 3, 4, 1999];
    let rest = ROW - cut.iter().sum::<usize>();
    let many = [&cut[..], &[rest]].concat();
    let case = |name, dma, a, documents: &[usize]| Case { name, dma, a, documents: documents.to_vec() };
    vec![
        case("dense", None, 0.0, &many),
        case("slope", Some(recent), 0.5, &[ROW]),
        case("slope, documents", Some(recent), 0.5, &many),
        case("slope alone", Some(recent), 0.0, &[ROW]),
        case("published", Some(published), 0.5, &[ROW]),
        case("published, documents", Some(published), 0.5, &many),
        // All keys have the same rank, so a query keeps the last ones.
        case("published, ties", Some(published), 0.0, &many),
    ]
}

/// One process on one GPU, with its tokens' packed tensor and gradient of o.
struct Gpu {
    device: burn::tensor::Device<Cuda>,
    qkv: Float<Cuda>,
    d_o: Float<Cuda>,
}

impl Gpu {
    /// Opens the process's GPU, and fills it with the `len` tokens of the row from token `first` on.
    fn open([first, len]: [usize; 2]) -> Self {
        let report = CudaReport::probe().expect("a GPU");
        let device = report.device(0).expect("a GPU");
        let root = std::env::var_os("XDG_CACHE_HOME").map_or_else(std::env::temp_dir, PathBuf::from);
        let cache = KernelCache::open(&root.join("sieve"), &device.arch(), report.nvrtc);
        let cache = cache.expect("a folder for kernels");
        cache.init_runtime().expect("once");
        std::mem::forget(cache);
        let device = Default::default();
        let rows = |seed, heads| {
            let places = first * heads * WIDTH..(first + len) * heads * WIDTH;
            let values = places.map(|at| value(seed, at)).collect();
            let rows = upload(values, [1, len, heads, WIDTH], &device);
            primitive(rows.cast(DType::BF16))
        };
        Self { qkv: rows(1, SPEC.packed_heads()), d_o: rows(2, SPEC.num_heads), device }
    }

    /// w_dt and a.
    fn weights(&self, case: &Case) -> [Float<Cuda>; 2] {
        let kv = SPEC.num_kv_heads;
        let w_dt = (0..kv * WIDTH * kv).map(|at| 0.1 * value(7, at)).collect();
        let a = (0..kv).map(|head| case.a * (1.0 + 0.1 * head as f32)).collect();
        [primitive(upload(w_dt, [kv, kv * WIDTH], &self.device)), primitive(upload(a, [kv], &self.device))]
    }
}

fn upload<const D: usize>(values: Vec<f32>, shape: [usize; D], device: &burn::tensor::Device<Cuda>) -> Tensor<Cuda, D> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}

/// A number between -1 and 1 with 8 significant bits, which is exact in bf16.
fn value(seed: u64, at: usize) -> f32 {
    let mut bits = (at as u64 ^ seed << 48).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((bits >> 40) as i32 % 128) as f32 / 128.0 * if bits & 1 == 0 { 1.0 } else { -1.0 }
}

/// Results of a case.
struct Found {
    o: Vec<f32>,
    d_qkv: Vec<f32>,
    /// For each KV head and key: the first query that no longer sees the key, or [`GONE`].
    expire: Vec<i32>,
}

/// The values of every sixteenth token: enough to find an error, with less to write and compare.
fn sampled(x: Float<Cuda>) -> Vec<f32> {
    let x = tensor::<Cuda, 4>(x);
    let [_, len, heads, width] = x.dims();
    let token = heads * width;
    let x = x.reshape([len / 16, 16 * token]).narrow(1, 15 * token, token);
    x.cast(DType::F32).into_data().iter::<f32>().collect()
}

fn ints(x: crate::tensors::Ints<Cuda>) -> Vec<i32> {
    let values = Tensor::<Cuda, 3, Int>::from_primitive(x).into_data();
    values.iter::<i32>().collect()
}

/// The results of the whole row on one GPU.
fn whole_results(gpu: &Gpu, case: &Case) -> Found {
    let [start, end] = bounds([&case.documents[..]], ROW);
    let documents = Documents::<Cuda>::new(&start, &end, [1, ROW], &gpu.device).bounds();
    let [w_dt, a] = gpu.weights(case);
    let inputs = [gpu.qkv.clone(), gpu.d_o.clone(), w_dt, a];
    let (o, d_qkv, dma) = attend::<Cuda>(inputs, documents, SPEC, case.dma, KeepOLow::default());
    Found { o: sampled(o), d_qkv: sampled(d_qkv), expire: dma.map_or(Vec::new(), |(expire, _)| ints(expire)) }
}

/// The results of this GPU's part. The attention's mask counts keys through the halo, then the part's own; `expire` in
/// the results counts positions in the whole row, at which `keys` ([`all_keys`]) finds the halo's keys.
fn part_results(gpu: &Gpu, links: &Arc<NcclGroup>, case: &Case, keys: &HashMap<[u32; 4], usize>) -> Found {
    let first = links.part() * LEN;
    let parts = ContextParallel::new(links.clone(), bounds([&case.documents[..]], ROW), [1, ROW]);
    let documents = Documents::<Cuda>::of_part(&parts, &gpu.device);
    let [w_dt, a] = gpu.weights(case);
    let dma = || -> Option<DmaParts<Cuda>> {
        let positions = documents.positions.clone().into_primitive();
        Some((layer(w_dt.clone(), a.clone(), case.dma?), positions))
    };
    let own_call = AttentionCall::new(documents.bounds(), SPEC);
    let place = (&parts, &own_call);
    let (qkv, d_o) = (gpu.qkv.clone(), gpu.d_o.clone());
    let parted = forward::<Cuda>(qkv.clone(), dma(), place, KeepOLow::default());
    let mut expire = Vec::new();
    if let Some((halo, Some(of_longer))) = parted.halo() {
        let (slots, kv, all) = (halo.slots, SPEC.num_kv_heads, first + LEN);
        let halo_keys = halo.keys.clone().map_or(Vec::new(), |keys| {
            let keys = tensor::<Cuda, 4>(keys).cast(DType::F32).into_data();
            keys.iter::<f32>().collect::<Vec<_>>()
        });
        expire = vec![GONE; kv * all];
        for (head, of_longer) in ints(of_longer).chunks(slots + LEN).enumerate() {
            for (place, &end) in of_longer.iter().enumerate() {
                let end = end - slots as i32 + first as i32;
                let position = match place.checked_sub(slots) {
                    Some(own) => first + own,
                    None => {
                        let key = &halo_keys[(place * 2 * kv + head) * WIDTH..][..WIDTH];
                        match keys.get(&key_bytes(key)) {
                            Some(at) if at % kv == head => at / kv,
                            _ => {
                                // An empty slot.
                                assert!(key.iter().all(|&x| x == 0.0), "key {place} of head {head}");
                                continue;
                            }
                        }
                    }
                };
                if end > first as i32 {
                    expire[head * all + position] = end;
                }
            }
        }
    }
    let o = sampled(parted.o.clone());
    let (d_qkv, _) = backward::<Cuda>(parted, qkv, dma(), place, d_o);
    Found { o, d_qkv: sampled(d_qkv), expire }
}

/// The first 16 numbers of a key in 16 bytes, which no other key has.
fn key_bytes(key: &[f32]) -> [u32; 4] {
    let byte = |x: &f32| (x * 128.0) as i32 as u32 & 0xff;
    let mut words = [0; 4];
    for (at, x) in key.iter().take(16).enumerate() {
        words[at / 4] |= byte(x) << (8 * (at % 4));
    }
    words
}

/// Index of every key, token * number of KV heads + head, by its [`key_bytes`].
fn all_keys() -> HashMap<[u32; 4], usize> {
    let (heads, kv) = (SPEC.packed_heads(), SPEC.num_kv_heads);
    let places = (0..ROW).flat_map(|token| (0..kv).map(move |head| (token, head)));
    let keys = places.map(|(token, head)| {
        let at = (token * heads + SPEC.num_heads + head) * WIDTH;
        let key = (at..at + 16).map(|at| value(1, at)).collect::<Vec<_>>();
        (key_bytes(&key), token * kv + head)
    });
    let keys = keys.collect::<HashMap<_, _>>();
    assert_eq!(keys.len(), ROW * kv, "two keys are alike");
    keys
}

/// Runs all cases for one part, in a process with one GPU, and writes the results to `folder`.
fn run_part(part_idx: usize, folder: &Path) {
    // The first tensor creates the CUDA context that NCCL uses.
    let gpu = Gpu::open([part_idx * LEN, LEN]);
    let id_file = folder.join("id");
    if part_idx == 0 {
        let partial = folder.join("id.partial");
        std::fs::write(&partial, NcclGroup::new_id().expect("NCCL")).expect("it is written");
        std::fs::rename(partial, &id_file).expect("it is renamed");
    }
    while !id_file.exists() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let id = std::fs::read(id_file).expect("it is there");
    let nccl = NcclGroup::join(0, &id, [part_idx, PARTS], NcclStream::Burns).expect("a group");
    let links = Arc::new(nccl);
    let keys = all_keys();
    for (number, case) in cases().iter().enumerate() {
        let found = part_results(&gpu, &links, case, &keys);
        let write = |what: &str, bytes: Vec<u8>| {
            let file = folder.join(format!("{number}-{part_idx}-{what}"));
            std::fs::write(file, bytes).expect("it is written");
        };
        let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect();
        write("o", bytes(&found.o));
        write("d_qkv", bytes(&found.d_qkv));
        write("expire", found.expire.iter().flat_map(|x| x.to_le_bytes()).collect());
    }
}

/// The Euclidean norm of the difference, divided by that of `expected`.
fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let apart: f64 = found.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    (apart / expected.iter().map(|&b| square(b)).sum::<f64>()).sqrt()
}

#[test]
#[ignore = "needs four GPUs of one host and NCCL"]
fn four_gpus_choose_the_keys_that_one_chooses() {
    if let Some(part) = std::env::var(PART).ok().and_then(|part| part.parse().ok()) {
        return run_part(part, Path::new(&std::env::var_os(FOLDER).expect("set with it")));
    }
    let folder = std::env::temp_dir().join(format!("sieve-parts-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let program = std::env::current_exe().expect("this one");
    let children = (0..PARTS).map(|part| {
        let mut child = Command::new(&program);
        child.args([NAME, "--exact", "--ignored", "--nocapture"]);
        child.env(PART, part.to_string()).env(FOLDER, &folder);
        child.env("CUDA_VISIBLE_DEVICES", part.to_string());
        child.spawn().expect("it starts")
    });
    for mut child in children.collect::<Vec<_>>() {
        assert!(child.wait().expect("it ends").success());
    }
    let gpu = Gpu::open([0, ROW]);
    for (number, case) in cases().iter().enumerate() {
        let expected = whole_results(&gpu, case);
        let read = |part: usize, what: &str| {
            let bytes = std::fs::read(folder.join(format!("{number}-{part}-{what}")));
            bytes.expect("written above")
        };
        let joined = |what: &str| {
            let bytes = (0..PARTS).flat_map(|part| read(part, what)).collect::<Vec<_>>();
            let values = bytes.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]]));
            values.collect::<Vec<_>>()
        };
        let (o, d_qkv) = (joined("o"), joined("d_qkv"));
        let mut compared = 0;
        for part in 0..PARTS {
            let (first, all) = ((part * LEN) as i32, (part + 1) * LEN);
            let bytes = read(part, "expire");
            let found = bytes.chunks_exact(4).map(|x| i32::from_le_bytes([x[0], x[1], x[2], x[3]]));
            for (at, found) in found.enumerate() {
                let (head, key) = (at / all, at % all);
                let whole = expected.expire[head * ROW + key].min(all as i32);
                let expected = if whole > first { whole } else { GONE };
                assert_eq!(found, expected, "{}: part {part}, head {head}, key {key}", case.name);
                compared += 1;
            }
        }
        let errors = [relative_error(&o, &expected.o), relative_error(&d_qkv, &expected.d_qkv)];
        println!(
            "{}: {compared} keys of parts are active for the same queries; o differs by {:.1e}, dqkv by {:.1e}",
            case.name, errors[0], errors[1]
        );
        assert!(errors.iter().all(|&error| error <= TOLERANCE), "{}", case.name);
    }
    std::fs::remove_dir_all(folder).expect("it is removed");
}
