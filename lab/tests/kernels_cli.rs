//! The commands of `sieve kernels`: `run` writes files that other programs can check, `check` runs on any machine,
//! `build` needs no GPU, and mistakes are reported in plain words.
use crate::tiny_run::TinyRun;
use sieve_cpu::reference::{AttentionCall, Heads, Results, Rounding};
use sieve_cpu::{Documents, Mask, ScaledShape};
use sieve_hf::TensorFile;
use sieve_testing::cases;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// A file of `sieve kernels run`: its tensors as f64 by name, and its metadata.
pub(crate) struct Written {
    pub(crate) tensors: BTreeMap<String, (Vec<usize>, Vec<f64>)>,
    pub(crate) metadata: BTreeMap<String, String>,
}

impl Written {
    fn read_tensors(path: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f64>)> {
        let file = TensorFile::open(path).expect("a safetensors file");
        let tensors = file.names().into_iter().map(|name| {
            let data = file.any_tensor(&name).expect("just listed");
            let shape = data.shape.to_vec();
            let values = data.convert::<f64>().to_vec().expect("f64");
            (name, (shape, values))
        });
        tensors.collect()
    }

    pub(crate) fn read(path: &Path) -> Self {
        let tensors = Self::read_tensors(path);
        let bytes = fs::read(path).expect("readable");
        let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).expect("a JSON header");
        let metadata = header["__metadata__"].as_object().expect("metadata");
        let text = |value: &serde_json::Value| value.as_str().expect("text").to_owned();
        let metadata = metadata.iter().map(|(k, v)| (k.clone(), text(v))).collect();
        Self { tensors, metadata }
    }

    pub(crate) fn values(&self, name: &str) -> &[f64] {
        &self.tensors[name].1
    }

    pub(crate) fn shape(&self, name: &str) -> &[usize] {
        &self.tensors[name].0
    }

    pub(crate) fn floats(&self, name: &str) -> Vec<f32> {
        self.values(name).iter().map(|&x| x as f32).collect()
    }

    pub(crate) fn ints(&self, name: &str) -> Vec<i32> {
        self.values(name).iter().map(|&x| x as i32).collect()
    }

    /// Largest absolute difference between a tensor and `expected`. The log-sum-exp of a query without keys is -inf in
    /// both.
    pub(crate) fn gap(&self, name: &str, expected: &[f64]) -> f64 {
        let pairs = self.values(name).iter().zip(expected);
        assert_eq!(pairs.len(), expected.len(), "{name}");
        let gaps = pairs.filter(|(_, own)| own.is_finite()).map(|(found, own)| (found - own).abs());
        gaps.fold(0.0, f64::max)
    }

    /// First position and end of each token's document, counted from the first token of their row.
    pub(crate) fn bounds(&self, seq_len: usize) -> [Vec<i32>; 2] {
        let (mut start, mut end) = (Vec::new(), Vec::new());
        for document in self.ints("cu_seqlens").windows(2) {
            let row = document[0] / seq_len as i32 * seq_len as i32;
            start.resize(document[1] as usize, document[0] - row);
            end.resize(document[1] as usize, document[1] - row);
        }
        [start, end]
    }

    /// Attention and its gradients, computed by their definition from the inputs in the file.
    pub(crate) fn defined(&self, mask: Mask<'_>) -> Results {
        let [q, k, v, d_o] = ["q", "k", "v", "do"].map(|name| self.floats(name));
        let (&[batch, seq_len, num_heads, head_dim], num_kv_heads) =
            (<&[usize; 4]>::try_from(self.shape("q")).expect("q has four dimensions"), self.shape("k")[2]);
        let [start, end] = self.bounds(seq_len);
        let shape = ScaledShape {
            softmax_scale: self.metadata["scale"].parse().expect("a number"),
            ..ScaledShape::new([batch, seq_len], [num_heads, num_kv_heads], head_dim)
        };
        let call = AttentionCall {
            shape,
            q: Heads::new(&q, num_heads, head_dim),
            k: Heads::new(&k, num_kv_heads, head_dim),
            v: Heads::new(&v, num_kv_heads, head_dim),
            d_o: Heads::new(&d_o, num_heads, head_dim),
            documents: Documents::new(&start, &end),
            mask,
        };
        call.run(Rounding::None)
    }

    /// Largest errors of `o`, of `lse` and of the gradients. With biases (`delta`), `base` is the largest bias that a
    /// query sees, and `lse` is of the logits minus `base`.
    fn errors(&self) -> [f64; 3] {
        let expire = self.ints("expire");
        let has_bias = self.tensors.contains_key("delta");
        let delta = if has_bias { self.floats("delta") } else { vec![0.0; expire.len()] };
        let all = self.defined(Mask::Expire { expire: &expire, delta: &delta });
        let mut gradients = vec![("dq", &all.dq), ("dk", &all.dk), ("dv", &all.dv)];
        if has_bias {
            gradients.push(("ddelta", &all.d_delta));
            let &[_, kv_heads, seq_len] = self.shape("expire") else { panic!("expire has three dimensions") };
            let [start, _] = self.bounds(seq_len);
            for (at, &base) in self.values("base").iter().enumerate() {
                let (row, i) = (at / seq_len, at % seq_len);
                let seen = start[row / kv_heads * seq_len + i] as usize..=i;
                let seen = seen.filter(|&j| (i as i32) < expire[row * seq_len + j]);
                let largest = seen.map(|j| delta[row * seq_len + j]).reduce(f32::max);
                assert_eq!(base, f64::from(largest.unwrap_or(0.0)), "row {row}, token {i}");
            }
        }
        let gaps = gradients.into_iter().map(|(name, own)| self.gap(name, own));
        [self.gap("o", &all.o), self.gap("lse", &all.lse), gaps.fold(0.0, f64::max)]
    }

    /// Checks DMA's mask with slopes by its definition: a query sees the last `local` keys and, of the older ones,
    /// those with the largest `rank`, `window` keys in all.
    fn check_sloped_mask(&self, window: usize, local: usize, periods: [f64; 2]) {
        let [batch, kv_heads, seq_len] = *self.shape("rank") else { panic!("rank has three dimensions") };
        let [start, _] = self.bounds(seq_len);
        let [z, rank, delta, expire] = ["z", "rank", "delta", "expire"].map(|name| self.values(name));
        assert_eq!(rank, delta);
        for row in 0..batch * kv_heads {
            let (at, token) = (row * seq_len, row / kv_heads * seq_len);
            for i in 0..seq_len {
                let first = start[token + i] as usize;
                let slope = (1.0 / periods[row % kv_heads]) as f32;
                assert_eq!(rank[at + i], f64::from(z[at + i] as f32 + (i - first) as f32 * slope));
                let older = (i + 1).saturating_sub(local).max(first);
                let mut kept: Vec<usize> = (first..older).collect();
                kept.sort_by(|&a, &b| rank[at + b].total_cmp(&rank[at + a]).then(b.cmp(&a)));
                kept.truncate(window - local);
                kept.extend(older..=i);
                kept.sort_unstable();
                let seen: Vec<usize> = (first..=i).filter(|&j| expire[at + j] > i as f64).collect();
                assert_eq!(seen, kept, "row {row}, query {i}");
            }
        }
    }
}

/// A folder to work in. The tests of this file do not use its corpus.
fn folder() -> TinyRun {
    TinyRun::dma()
}

#[test]
fn a_file_holds_inputs_outputs_and_gradients_that_agree() {
    let tiny = folder();
    let sizes = "batch=2,seq_len=61,heads=4,kv_heads=2,head_dim=32";
    for [op, more, names] in cases(
        r#"
        attention =>  => q k v do o lse dq dk dv expire cu_seqlens
        swa => --window 9 --documents 3 => q k v do o lse dq dk dv expire cu_seqlens
        dma => --window 9 --documents 2 --scores rising => q k v z delta do o lse base dq dk dv ddelta expire cu_seqlens
        dma => --window 9 --local-window 3 --periods 4,30 --documents 2 => \
            q k v z rank delta do o lse base dq dk dv ddelta expire cu_seqlens
    "#,
    ) {
        tiny.prints(&format!("kernels run {op} --shape {sizes} {more} --seed 5 --out {op}.safetensors --device cpu"));
        let written = Written::read(&tiny.path(&format!("{op}.safetensors")));
        let mut expected: Vec<&str> = names.split(' ').collect();
        expected.sort_unstable();
        assert!(written.tensors.keys().eq(expected), "{op}: {:?}", written.tensors.keys());
        assert_eq!(written.shape("dk"), [2, 61, 2, 32]);
        assert_eq!(written.shape("lse"), [2, 4, 61]);
        assert_eq!(written.shape("expire"), [2, 2, 61]);
        assert_eq!(written.metadata["op"], op);
        let [o, lse, gradients] = written.errors();
        assert!(o < 2e-5 && lse < 2e-5 && gradients < 2e-4, "{op}: {o:.1e} {lse:.1e} {gradients:.1e}");
        if more.contains("periods") {
            written.check_sloped_mask(9, 3, [4.0, 30.0]);
        }
        // A softmax does not change if all its logits grow by the same number, so the gradients of the biases sum to 0.
        if op == "dma" {
            let sum: f64 = written.values("ddelta").iter().sum();
            assert!(sum.abs() < 1e-3, "{sum}");
        }
    }
}

#[test]
fn scores_of_a_trained_model_can_be_used() {
    let tiny = folder();
    tiny.trained("run", "--set training.steps=8");
    let captured = "kernels capture --checkpoint run --out z --device cpu";
    tiny.prints(captured);
    let z = Written::read_tensors(&tiny.path("z"));
    // Two layers with one KV head each; the tokens are whole rows of 32.
    assert_eq!(z["z"].0[0], 2);
    assert_eq!(z["z"].0[1] % 32, 0);
    assert!(z["z"].0[1] > 4096, "{:?}", z["z"].0);
    let op = "kernels run dma --shape seq_len=300,heads=2,kv_heads=2,head_dim=16 --window 40 --device cpu";
    tiny.prints(&format!("{op} --scores captured:z --out out"));
    let written = Written::read(&tiny.path("out"));
    assert_eq!(written.values("z")[..300], z["z"].1[..300]);
    assert!(written.errors()[0] < 2e-5);

    let long = "kernels run dma_select --shape seq_len=9999999,heads=1,head_dim=16 --window 40 --scores captured:z \
        --out out --device cpu";
    tiny.refuses(long, "too short for seq_len=9999999 | hint");
}
