//! The step's launch wrappers themselves: rows with gaps, sums added to what is there, results in place, equal repeats,
//! and the gates of the optimizer. Values are compared with the plain-Burn references.
use super::{fp8, losses};
use crate::bar::Bar;
use crate::device::Device;
use crate::extent::Extent;
use crate::place::{float, floats};
use crate::report::Report;
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use sieve_core::AdamWStep;
use sieve_kernels::{
    AdamwTensors, CudaTensor, FixedSum, GradientTarget, KernelError, QkNormRope, Qkv, Reuse,
    ScoreBias, ScoresBackward, Term, adamw, dma_scores, dma_scores_backward, embedding_backward,
    embedding_forward, fixed_sum, join_master, qk_norm_rope_backward, qk_norm_rope_forward,
    residual_add, rms_norm_backward, rms_norm_backward_with_output, rms_norm_forward,
    rms_norm_residual_forward, split_master, sum_of_squares, swiglu_backward,
    swiglu_backward_with_output, swiglu_forward,
};
use sieve_ops::{AttentionSpec, QkNormRopeCall, RmsNormCall, RopeTables, reference};
use sieve_testing::{Random, round_bf16};

const EPSILON: f64 = 1e-6;

/// Largest error of each call, as a share of what is allowed.
pub(super) type Outcome = Result<f32, String>;

/// Elements between the end of a row and the next.
const GAP: usize = 24;

/// Runs all of them; the emulator gets the small sizes.
pub(crate) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) {
    let Extent {
        seed, is_emulated, ..
    } = *extent;
    let few = |sizes: &'static [[usize; 2]]| &sizes[..if is_emulated { 2 } else { sizes.len() }];
    let mut add =
        |name: &str, case: String, outcome: Outcome| report.add(name, "kernel", &case, outcome);
    for &[rows, width] in few(&[
        [7, 64],
        [5, 2056],
        [1, 8],
        [777, 1024],
        [2049, 768],
        [301, 5120],
        [7, 8192],
    ]) {
        let case = format!("{rows} x {width}");
        add(
            "rms_norm",
            case,
            Calls::new(device, seed).rms_norm(rows, width),
        );
    }
    for &[rows, d_ff] in few(&[[3, 40], [2, 99], [1, 8], [777, 1032], [1024, 6144]]) {
        for dtype in [DType::BF16, DType::F32] {
            let case = format!("{rows} x {d_ff} {}", dtype.name());
            add(
                "swiglu",
                case,
                Calls::new(device, seed).swiglu(rows, d_ff, dtype),
            );
        }
    }
    let heads: &[[usize; 4]] = &[
        [5, 3, 1, 64],
        [1, 1, 1, 16],
        [77, 5, 3, 96],
        [1001, 12, 4, 64],
        [4099, 16, 8, 128],
        [33, 7, 2, 128],
    ];
    for &[tokens, heads, kv_heads, head_dim] in &heads[..if is_emulated { 2 } else { heads.len() }]
    {
        let case = format!("{tokens} tokens, {heads}/{kv_heads} heads of {head_dim}");
        let outcome = Calls::new(device, seed).qk_norm_rope(tokens, [heads, kv_heads], head_dim);
        add("qk_norm_rope", case, outcome);
    }
    let tables: &[[usize; 3]] = &[
        [61, 7, 64],
        [33, 257, 72],
        [1, 5, 8],
        [4097, 50280, 768],
        [5000, 300, 2056],
        [777, 100_000, 64],
        [31, 3000, 4096],
    ];
    for &[tokens, vocab, width] in &tables[..if is_emulated { 2 } else { tables.len() }] {
        for ids in [Ids::Any, Ids::Same, Ids::Outside] {
            let case = format!("{tokens} tokens of {vocab} x {width}, {ids:?}");
            add(
                "embedding",
                case,
                Calls::new(device, seed).embedding([tokens, vocab, width], ids),
            );
        }
    }
    for &[size, _] in few(&[
        [1027, 0],
        [1, 0],
        [5, 0],
        [65536, 0],
        [65537, 0],
        [1_234_567, 0],
    ]) {
        add(
            "adamw, split_master",
            format!("{size}"),
            Calls::new(device, seed).adamw(size),
        );
        add(
            "sums",
            format!("{size}"),
            Calls::new(device, seed).sums(size),
        );
    }
    let kv_heads: &[usize] = match is_emulated {
        true => &[3],
        false => &[1, 2, 3, 4, 8, 16, 32],
    };
    for &kv_heads in kv_heads {
        for (tokens, head_dim) in [(33, 64), (257, 128), (1001, 96)] {
            let case = format!("{tokens} tokens, {kv_heads} heads of {head_dim}");
            let outcome = Calls::new(device, seed).dma_scores(tokens, kv_heads, head_dim);
            add("dma_scores", case, outcome);
        }
    }
    add(
        "residual_add",
        "77 x 2056".to_owned(),
        Calls::new(device, seed).residual_add(),
    );
    fp8::check_rounding(report, device, extent);
    losses::check(report, device, extent);
}

/// Token numbers of an embedding.
#[derive(Clone, Copy, Debug)]
enum Ids {
    Any,
    Same,
    /// Some below 0 and some past the vocabulary.
    Outside,
}

pub(super) struct Calls<'a> {
    pub(super) device: &'a dyn Device,
    pub(super) random: Random,
    pub(super) worst: f32,
}

/// A tensor on the device and its values.
pub(super) struct Input {
    pub(super) on: CudaTensor,
    pub(super) values: Vec<f32>,
}

impl<'a> Calls<'a> {
    pub(super) fn new(device: &'a dyn Device, seed: u64) -> Self {
        let random = Random(seed);
        Self {
            device,
            random,
            worst: 0.0,
        }
    }

    fn pitched(&mut self, rows: usize, width: usize, dtype: DType) -> Result<Input, String> {
        self.with_gaps([rows, width], GAP, dtype)
    }

    /// Rows with this many NaN between them.
    pub(super) fn with_gaps(
        &mut self,
        [rows, width]: [usize; 2],
        gap: usize,
        dtype: DType,
    ) -> Result<Input, String> {
        let values = self.random.bf16_normals(rows * width);
        let mut buffer = Vec::with_capacity(rows * (width + gap));
        for row in values.chunks_exact(width) {
            buffer.extend(row);
            buffer.resize(buffer.len() + gap, f32::NAN);
        }
        let all = self.device.float(&buffer, &[rows, width + gap], dtype);
        let on = all
            .view("check", "x", &[rows, width], &[width + gap, 1])
            .map_err(text)?;
        Ok(Input { on, values })
    }

    pub(super) fn flat(&mut self, shape: &[usize], dtype: DType) -> Input {
        let values = self.random.bf16_normals(shape.iter().product());
        Input {
            on: self.device.float(&values, shape, dtype),
            values,
        }
    }

    /// Within one rounding to bf16, or, in f32, within the noise of a sum.
    pub(super) fn close(
        &mut self,
        name: &str,
        got: &CudaTensor,
        exact: &[f32],
    ) -> Result<(), String> {
        let share = if got.dtype() == DType::BF16 {
            1.0 / 256.0
        } else {
            2e-5
        };
        let bar = Bar {
            plain: 0.0,
            floor: 1e-6,
            share,
            norm: false,
        };
        let got = self.device.floats(got).map_err(text)?;
        self.worst = self.worst.max(bar.judge(name, &got, exact, exact)?);
        Ok(())
    }

    /// Equal to the last bit.
    fn equal(&self, what: &str, a: &CudaTensor, b: &CudaTensor) -> Result<(), String> {
        let (a, b) = (
            self.device.floats(a).map_err(text)?,
            self.device.floats(b).map_err(text)?,
        );
        same(what, &a, &b)
    }

    fn rms_norm(mut self, rows: usize, width: usize) -> Outcome {
        let [x, residual, dy, beside] = [
            self.pitched(rows, width, DType::BF16)?,
            self.pitched(rows, width, DType::BF16)?,
            self.pitched(rows, width, DType::BF16)?,
            self.pitched(rows, width, DType::BF16)?,
        ];
        let (weight, before) = (
            self.flat(&[width], DType::BF16),
            self.flat(&[width], DType::F32),
        );
        let host = |values: &[f32]| float::<Flex, 2>(values, [rows, width], &FlexDevice);
        let host_weight = || float::<Flex, 1>(&weight.values, [width], &FlexDevice);
        let call = |x: &[f32]| RmsNormCall::<Flex> {
            x: host(x),
            weight: host_weight(),
            epsilon: EPSILON,
        };
        let norm = |x: &[f32]| floats::<Flex, 2>(reference::rms_norm::<Flex>(call(x)));
        let epsilon = EPSILON as f32;
        let y = rms_norm_forward(&x.on, &weight.on, epsilon).map_err(text)?;
        self.close("y", &y, &norm(&x.values))?;
        let (sum, y_of_sum) =
            rms_norm_residual_forward(&x.on, &residual.on, &weight.on, epsilon).map_err(text)?;
        let added: Vec<f32> = added(&x.values, &residual.values).map(round_bf16).collect();
        same(
            "x + residual",
            &self.device.floats(&sum).map_err(text)?,
            &added,
        )?;
        self.close("y of x + residual", &y_of_sum, &norm(&added))?;

        let (dx_exact, dweight_exact) =
            reference::rms_norm_backward::<Flex>(call(&x.values), host(&dy.values));
        let (dx_exact, dweight_exact) = (
            floats::<Flex, 2>(dx_exact),
            floats::<Flex, 1>(dweight_exact),
        );
        let backward = |d_residual, target| {
            rms_norm_backward(&x.on, &weight.on, epsilon, &dy.on, d_residual, target).map_err(text)
        };
        let (dx, dweight) = backward(None, GradientTarget::New)?;
        self.close("dx", &dx, &dx_exact)?;
        self.close("dweight", &dweight, &dweight_exact)?;
        let (again, dweight_again) = backward(None, GradientTarget::New)?;
        self.equal("dx of two runs", &again, &dx)?;
        self.equal("dweight of two runs", &dweight_again, &dweight)?;
        let (both, total) = backward(Some(&beside.on), GradientTarget::AddTo(&before.on))?;
        let expected: Vec<f32> = added_of(&dx_exact, &beside.values);
        self.close("dx + its residual", &both, &expected)?;
        self.close(
            "dweight added",
            &total,
            &added_of(&dweight_exact, &before.values),
        )?;
        let (with_y, dweight_too, y_again) = rms_norm_backward_with_output(
            &x.on,
            &weight.on,
            epsilon,
            &dy.on,
            &beside.on,
            GradientTarget::New,
        )
        .map_err(text)?;
        self.equal("dx beside y", &with_y, &both)?;
        self.equal("dweight beside y", &dweight_too, &dweight)?;
        self.close("y again", &y_again, &norm(&x.values))?;
        Ok(self.worst)
    }

    fn swiglu(mut self, rows: usize, d_ff: usize, dtype: DType) -> Outcome {
        let (gate_up, dy) = (
            self.pitched(rows, 2 * d_ff, dtype)?,
            self.pitched(rows, d_ff, dtype)?,
        );
        let host = || float::<Flex, 2>(&gate_up.values, [rows, 2 * d_ff], &FlexDevice);
        let y = swiglu_forward(&gate_up.on).map_err(text)?;
        let exact = floats::<Flex, 2>(reference::swiglu::<Flex>(host()));
        self.close("y", &y, &exact)?;
        let dx = swiglu_backward(&gate_up.on, &dy.on).map_err(text)?;
        let host_dy = float::<Flex, 2>(&dy.values, [rows, d_ff], &FlexDevice);
        let dx_exact = floats::<Flex, 2>(reference::swiglu_backward::<Flex>(host(), host_dy));
        self.close("dx", &dx, &dx_exact)?;
        // Without gaps, so that the results can take their place.
        let (gate_up, dy) = (gate_up.on.contiguous(), dy.on.contiguous());
        let with_y = |reuse| swiglu_backward_with_output(&gate_up, &dy, reuse).map_err(text);
        let (dx_too, y_too) = with_y(Reuse::Copy)?;
        self.equal("dx beside y", &dx_too, &dx)?;
        self.close("y again", &y_too, &exact)?;
        let (in_place, y_in_place) = with_y(Reuse::InPlace)?;
        self.equal("dx in place", &in_place, &dx)?;
        self.equal("y in place", &y_in_place, &y_too)?;
        Ok(self.worst)
    }

    fn qk_norm_rope(
        mut self,
        tokens: usize,
        [heads, kv_heads]: [usize; 2],
        head_dim: usize,
    ) -> Outcome {
        const POSITIONS: usize = 5000;
        let packed = heads + 2 * kv_heads;
        let shape = [1, tokens, packed, head_dim];
        let (qkv, dy) = (
            self.flat(&shape, DType::BF16),
            self.flat(&shape, DType::BF16),
        );
        let weights = [0, 1].map(|_| self.flat(&[head_dim], DType::BF16));
        let positions: Vec<i32> = (0..tokens)
            .map(|_| self.random.below(POSITIONS) as i32)
            .collect();
        let half = head_dim / 2;
        let angle =
            |at: usize| (at / half) as f64 * 10000f64.powf(-((at % half) as f64) / half as f64);
        let table = |of: fn(f64) -> f64| -> Vec<f32> {
            (0..POSITIONS * half)
                .map(|at| of(angle(at)) as f32)
                .collect()
        };
        let (cos, sin) = (table(f64::cos), table(f64::sin));
        let on = |values: &[f32]| self.device.float(values, &[POSITIONS, half], DType::F32);
        let (cos_on, sin_on) = (on(&cos), on(&sin));
        let positions_on = self.device.int(&positions, &[1, tokens]);
        let args = QkNormRope {
            q_weight: &weights[0].on,
            k_weight: &weights[1].on,
            positions: &positions_on,
            cos: &cos_on,
            sin: &sin_on,
            num_kv_heads: kv_heads,
            epsilon: EPSILON as f32,
        };
        let host = |values: &[f32]| float::<Flex, 4>(values, shape, &FlexDevice);
        let host_call = || QkNormRopeCall::<Flex> {
            q_weight: float::<Flex, 1>(&weights[0].values, [head_dim], &FlexDevice),
            k_weight: float::<Flex, 1>(&weights[1].values, [head_dim], &FlexDevice),
            positions: Tensor::<Flex, 2, Int>::from_data(
                TensorData::new(positions.clone(), [1, tokens]),
                &FlexDevice,
            )
            .into_primitive(),
            rope: RopeTables {
                cos: float::<Flex, 2>(&cos, [POSITIONS, half], &FlexDevice),
                sin: float::<Flex, 2>(&sin, [POSITIONS, half], &FlexDevice),
            },
            num_kv_heads: kv_heads,
            epsilon: EPSILON,
        };
        let y = qk_norm_rope_forward(&qkv.on, &args, Reuse::Copy).map_err(text)?;
        let y_exact = reference::qk_norm_rope::<Flex>(host(&qkv.values), host_call());
        self.close("y", &y, &floats::<Flex, 4>(y_exact))?;
        let (dqkv, dq, dk) = reference::qk_norm_rope_backward::<Flex>(
            host(&qkv.values),
            host_call(),
            host(&dy.values),
        );
        let backward = |reuse| {
            qk_norm_rope_backward(
                &qkv.on,
                &args,
                &dy.on,
                reuse,
                [GradientTarget::New, GradientTarget::New],
            )
            .map_err(text)
        };
        let copied = backward(Reuse::Copy)?;
        self.close("dqkv", &copied.dqkv, &floats::<Flex, 4>(dqkv))?;
        self.close("dq_weight", &copied.dq_weight, &floats::<Flex, 1>(dq))?;
        self.close("dk_weight", &copied.dk_weight, &floats::<Flex, 1>(dk))?;
        let in_place = backward(Reuse::InPlace)?;
        self.equal("dqkv in place", &in_place.dqkv, &copied.dqkv)?;
        self.equal(
            "dq_weight of two runs",
            &in_place.dq_weight,
            &copied.dq_weight,
        )?;
        let y_in_place = qk_norm_rope_forward(&qkv.on, &args, Reuse::InPlace).map_err(text)?;
        self.equal("y in place", &y_in_place, &y)?;
        Ok(self.worst)
    }

    fn embedding(mut self, [tokens, vocab, width]: [usize; 3], kind: Ids) -> Outcome {
        let weight = self.flat(&[vocab, width], DType::BF16);
        let (dy, before) = (
            self.pitched(tokens, width, DType::BF16)?,
            self.flat(&[vocab, width], DType::F32),
        );
        let ids: Vec<i32> = (0..tokens)
            .map(|at| match kind {
                Ids::Same => 3,
                Ids::Outside if at % 7 == 0 => -1,
                Ids::Outside if at % 7 == 1 => vocab as i32,
                _ => self.random.below(vocab) as i32,
            })
            .collect();
        let on = self.device.int(&ids, &[1, tokens]);
        let pitch = width + GAP;
        let strides = [tokens * pitch, pitch, 1];
        let dy_on = dy.on.view("check", "dy", &[1, tokens, width], &strides);
        let dy_on = dy_on.map_err(text)?;
        let mut expected = Vec::new();
        let mut sums = vec![0.0f64; vocab * width];
        for (at, &id) in ids.iter().enumerate() {
            if id < 0 || id as usize >= vocab {
                expected.extend(std::iter::repeat_n(f32::NAN, width));
                continue;
            }
            let row = id as usize * width;
            expected.extend(&weight.values[row..row + width]);
            for column in 0..width {
                sums[row + column] += f64::from(dy.values[at * width + column]);
            }
        }
        let y = embedding_forward(&weight.on, &on).map_err(text)?;
        same("rows", &self.device.floats(&y).map_err(text)?, &expected)?;
        let sums: Vec<f32> = sums.into_iter().map(|x| x as f32).collect();
        let backward = |target| embedding_backward(&dy_on, &on, vocab, target).map_err(text);
        let dweight = backward(GradientTarget::New)?;
        self.close("dweight", &dweight, &sums)?;
        self.equal(
            "dweight of two runs",
            &backward(GradientTarget::New)?,
            &dweight,
        )?;
        let total = backward(GradientTarget::AddTo(&before.on))?;
        self.close("dweight added", &total, &added_of(&sums, &before.values))?;
        Ok(self.worst)
    }

    fn adamw(mut self, size: usize) -> Outcome {
        const UPDATE: AdamWStep = AdamWStep {
            lr: 3e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            bias_correction1: 0.521_703_1,
            bias_correction2: 0.301_662_7,
        };
        let normal = |random: &mut Random| {
            (0..size)
                .map(|_| random.normal_with_tails())
                .collect::<Vec<f32>>()
        };
        let [p, m, g] = [0, 1, 2].map(|_| normal(&mut self.random));
        let v: Vec<f32> = normal(&mut self.random).iter().map(|x| x * x).collect();
        let device = self.device;
        let on = |values: &[f32]| device.float(values, &[size], DType::F32);
        let scale = device.float(&[0.5], &[1], DType::F32);
        let (param, exp_avg, exp_avg_sq, grad) = (on(&p), on(&m), on(&v), on(&g));
        let leaf = device.float(&vec![f32::NAN; size], &[size], DType::BF16);
        let step = |param: &CudaTensor,
                    moments: [&CudaTensor; 2],
                    grad: &CudaTensor,
                    scale: &CudaTensor,
                    leaf: Option<&CudaTensor>| {
            let [exp_avg, exp_avg_sq] = moments;
            let tensors = AdamwTensors {
                param,
                exp_avg,
                exp_avg_sq,
                grad,
                grad_scale: scale,
                leaf,
            };
            adamw(tensors, UPDATE).map_err(text)
        };
        step(&param, [&exp_avg, &exp_avg_sq], &grad, &scale, Some(&leaf))?;
        let mut exact = [Vec::new(), Vec::new(), Vec::new()];
        for at in 0..size {
            let grad = f64::from(g[at]) * 0.5;
            let m = f64::from(m[at]) * UPDATE.beta1 + grad * (1.0 - UPDATE.beta1);
            let v = f64::from(v[at]) * UPDATE.beta2 + grad * grad * (1.0 - UPDATE.beta2);
            let root = (v / UPDATE.bias_correction2).sqrt() + UPDATE.eps;
            let kept = f64::from(p[at]) * (1.0 - UPDATE.lr * UPDATE.weight_decay);
            let p = kept - UPDATE.lr / UPDATE.bias_correction1 * m / root;
            for (list, value) in exact.iter_mut().zip([p, m, v]) {
                list.push(value as f32);
            }
        }
        for (name, got, exact) in [
            ("param", &param, &exact[0]),
            ("exp_avg", &exp_avg, &exact[1]),
            ("exp_avg_sq", &exp_avg_sq, &exact[2]),
        ] {
            self.close(name, got, exact)?;
        }
        let whole = device.floats(&param).map_err(text)?;
        let rounded: Vec<f32> = whole.iter().map(|&x| round_bf16(x)).collect();
        same("leaf", &device.floats(&leaf).map_err(text)?, &rounded)?;

        // The same update on a leaf and what it lacks of the master: equal to the last bit.
        let (leaf, rest) = split_master(&on(&p)).map_err(text)?;
        same(
            "split and joined",
            &device
                .floats(&join_master(&leaf, &rest).map_err(text)?)
                .map_err(text)?,
            &p,
        )?;
        let (moment, second) = (on(&m), on(&v));
        step(&rest, [&moment, &second], &grad, &scale, Some(&leaf))?;
        self.equal(
            "param of a split master",
            &join_master(&leaf, &rest).map_err(text)?,
            &param,
        )?;
        self.equal("exp_avg of a split master", &moment, &exp_avg)?;
        self.equal("exp_avg_sq of a split master", &second, &exp_avg_sq)?;

        // A scale that is 0 or no number: nothing moves, whatever the gradient holds.
        let nan = device.float(&vec![f32::NAN; size], &[size], DType::F32);
        for gate in [0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let gate = device.float(&[gate], &[1], DType::F32);
            let (p, m, v) = (on(&whole), on(&exact[1]), on(&exact[2]));
            step(&p, [&m, &v], &nan, &gate, None)?;
            same(
                "param behind a gate",
                &device.floats(&p).map_err(text)?,
                &whole,
            )?;
            same(
                "exp_avg behind a gate",
                &device.floats(&m).map_err(text)?,
                &exact[1],
            )?;
            same(
                "exp_avg_sq behind a gate",
                &device.floats(&v).map_err(text)?,
                &exact[2],
            )?;
            step(&rest, [&m, &v], &nan, &gate, Some(&leaf))?;
            self.equal(
                "a split master behind a gate",
                &join_master(&leaf, &rest).map_err(text)?,
                &param,
            )?;
        }
        Ok(self.worst)
    }

    fn sums(mut self, size: usize) -> Outcome {
        for dtype in [DType::F32, DType::BF16] {
            let x = self.flat(&[size], dtype);
            let wide = || x.values.iter().map(|&x| f64::from(x));
            // The error is held against the sum of magnitudes: where terms cancel, the sum is small and its rounding is
            // not.
            let sum = self
                .device
                .floats(&fixed_sum(&x.on).map_err(text)?)
                .map_err(text)?[0];
            let largest = wide().map(f64::abs).sum::<f64>();
            let off = (f64::from(sum) - wide().sum::<f64>()).abs();
            if off.is_nan() || off > 1e-5 * largest {
                return Err(format!(
                    "the sum of {size} is {sum}, expected {}",
                    wide().sum::<f64>()
                ));
            }
            let squares: f64 = wide().map(|x| x * x).sum();
            self.close(
                "sum of squares",
                &sum_of_squares(&x.on).map_err(text)?,
                &[squares as f32],
            )?;
        }
        // 3 and 4: a norm of 5.
        let clipped = |values: &[f32], max_norm: f32| -> Result<[f32; 2], String> {
            let mut sum = FixedSum::new(
                &self.device.float(&[0.0], &[1], DType::F32),
                Term::Square,
                [values.len()],
            );
            sum.add(&self.device.float(values, &[values.len()], DType::F32))
                .map_err(text)?;
            let norm = sum.clip(max_norm).map_err(text)?;
            Ok([
                self.device.floats(&norm.norm).map_err(text)?[0],
                self.device.floats(&norm.scale).map_err(text)?[0],
            ])
        };
        let [norm, scale] = clipped(&[3.0, 4.0], 1.0)?;
        let off = (norm - 5.0).abs().max((scale - 0.2).abs());
        if norm.is_nan() || scale.is_nan() || off > 1e-5 {
            return Err(format!("norm {norm} of 3 and 4, clipped by {scale}"));
        }
        if clipped(&[3.0, 4.0], 7.0)?[1] != 1.0 {
            return Err("a small norm was clipped".to_owned());
        }
        for bad in [f32::NAN, f32::INFINITY] {
            if clipped(&[1.0, bad], 1.0)?[1] != 0.0 {
                return Err(format!("a gradient of {bad} does not close the gate"));
            }
        }
        Ok(self.worst)
    }

    fn dma_scores(mut self, tokens: usize, kv_heads: usize, head_dim: usize) -> Outcome {
        const BATCH: usize = 2;
        let shape = [BATCH, tokens, 4 * kv_heads, head_dim];
        let (qkv, dqkv) = (
            self.flat(&shape, DType::BF16),
            self.flat(&shape, DType::BF16),
        );
        let w_dt: Vec<f32> = (0..kv_heads * head_dim * kv_heads)
            .map(|_| self.random.normal_with_tails() / (kv_heads as f32 * head_dim as f32).sqrt())
            .collect();
        let w_dt_on = self
            .device
            .float(&w_dt, &[kv_heads * head_dim, kv_heads], DType::F32);
        let a = self.flat(&[kv_heads], DType::F32);
        let dz = self.flat(&[BATCH, kv_heads, tokens], DType::F32);
        let spec = AttentionSpec {
            num_heads: 2 * kv_heads,
            num_kv_heads: kv_heads,
            softmax_scale: 1.0,
            window_size: None,
        };
        let host = |values: &[f32]| float::<Flex, 4>(values, shape, &FlexDevice);
        let host_w = || float::<Flex, 2>(&w_dt, [kv_heads * head_dim, kv_heads], &FlexDevice);
        let host_a = || float::<Flex, 1>(&a.values, [kv_heads], &FlexDevice);
        let z = reference::dma_scores::<Flex>(host(&qkv.values), host_w(), host_a(), spec);
        let heads = Qkv::packed(&qkv.on, 2 * kv_heads, kv_heads);
        let scores = dma_scores(&heads, &w_dt_on, &a.on, ScoreBias::Exp).map_err(text)?;
        let z = floats::<Flex, 3>(z);
        self.close("z", &scores.z, &z)?;
        let delta: Vec<f32> = z.iter().map(|z| z.min(60.0).exp()).collect();
        let bar = Bar {
            plain: 0.0,
            floor: 1e-6,
            share: 1e-4,
            norm: false,
        };
        let got = self.device.floats(&scores.delta).map_err(text)?;
        self.worst = self.worst.max(bar.judge("delta", &got, &delta, &delta)?);

        let (dqkv_exact, dw_exact, da_exact) = reference::dma_scores_backward::<Flex>(
            host(&qkv.values),
            host_w(),
            host_a(),
            spec,
            float::<Flex, 3>(&dz.values, [BATCH, kv_heads, tokens], &FlexDevice),
            host(&dqkv.values),
        );
        let call = ScoresBackward {
            qkv: &heads,
            w_dt: &w_dt_on,
            a: &a.on,
            x: &scores.x,
            dz: &dz.on,
        };
        let into = Qkv::packed(&dqkv.on, 2 * kv_heads, kv_heads);
        let (dw, da) = dma_scores_backward(call, &into, GradientTarget::New, GradientTarget::New)
            .map_err(text)?;
        self.close("dv among dqkv", &dqkv.on, &floats::<Flex, 4>(dqkv_exact))?;
        self.close("dw_dt", &dw, &floats::<Flex, 2>(dw_exact))?;
        self.close("da", &da, &floats::<Flex, 1>(da_exact))?;
        Ok(self.worst)
    }

    fn residual_add(mut self) -> Outcome {
        let (a, b) = (
            self.pitched(77, 2056, DType::BF16)?,
            self.pitched(77, 2056, DType::BF16)?,
        );
        let sum = residual_add(&a.on, &b.on).map_err(text)?;
        let exact: Vec<f32> = added(&a.values, &b.values).map(round_bf16).collect();
        same("bf16", &self.device.floats(&sum).map_err(text)?, &exact)?;
        let (a, b) = (
            self.flat(&[77, 2056], DType::F32),
            self.flat(&[77, 2056], DType::F32),
        );
        let sum = residual_add(&a.on, &b.on).map_err(text)?;
        same(
            "f32",
            &self.device.floats(&sum).map_err(text)?,
            &added_of(&a.values, &b.values),
        )?;
        Ok(self.worst)
    }
}

pub(super) fn text(error: KernelError) -> String {
    error.to_string()
}

fn added<'a>(a: &'a [f32], b: &'a [f32]) -> impl Iterator<Item = f32> + 'a {
    a.iter().zip(b).map(|(a, b)| a + b)
}

fn added_of(a: &[f32], b: &[f32]) -> Vec<f32> {
    added(a, b).collect()
}

/// Equal to the last bit; a NaN equals a NaN.
pub(super) fn same(what: &str, got: &[f32], expected: &[f32]) -> Result<(), String> {
    let equal = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
    let differ = got.iter().zip(expected).position(|pair| !equal(pair));
    match differ {
        None if got.len() == expected.len() => Ok(()),
        None => Err(format!(
            "{what}: {} numbers, expected {}",
            got.len(),
            expected.len()
        )),
        Some(at) => Err(format!(
            "{what}: number {at} is {}, expected {}",
            got[at], expected[at]
        )),
    }
}
