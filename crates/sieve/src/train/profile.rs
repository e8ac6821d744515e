//! `--profile N`: times of each kernel in N steps. With several processes, rank 0's GPU is traced.
use anyhow::{Result, bail};
use sieve_core::ModelShape;
use sieve_core::model::peak_bf16_flops;
use sieve_kernels::{KernelTrace, TraceResult};
use sieve_train::StepReport;
use std::ops::Range;

/// Steps before the trace. In the first steps kernels are compiled and memory is allocated.
const WARM_UP_STEPS: u64 = 4;
/// Number of kernels that get a line of their own.
const LISTED: usize = 24;
/// Number of kernels that are listed by the idle time before them.
const LISTED_GAPS: usize = 6;

/// Traces the steps between two logged steps of a run.
pub(super) struct StepProfile {
    /// The trace starts after this step: the first multiple of N after the warm-up. Only multiples of N are logged.
    first_traced: u64,
    shape: ModelShape,
    num_processes: u64,
    /// Processes that share the optimizer's work.
    num_shards: u64,
    /// The GPU's peak bf16 FLOP/s; `None` for an unknown GPU.
    peak_flops: Option<f64>,
    state: State,
}

enum State {
    Waiting,
    /// Since a step, and the tokens of all processes up to it.
    Tracing(KernelTrace, [u64; 2]),
    Done,
}

impl StepProfile {
    /// `steps` are the steps of the run, without those done before it.
    ///
    /// # Errors
    /// A run that ends before the steps are traced.
    pub(super) fn new(
        num_steps: u64,
        steps: Range<u64>,
        shape: &ModelShape,
        [num_processes, num_shards]: [usize; 2],
        gpu_name: &str,
    ) -> Result<Self> {
        let first_traced = (steps.start + WARM_UP_STEPS).next_multiple_of(num_steps);
        let needed = first_traced + num_steps;
        if steps.end < needed {
            bail!(
                "--profile {num_steps} needs a run that goes to step {needed}, this one ends at {}\n  \
                 hint: raise training.steps or profile fewer steps",
                steps.end
            );
        }
        Ok(Self {
            first_traced,
            shape: shape.clone(),
            num_processes: num_processes as u64,
            num_shards: num_shards as u64,
            peak_flops: peak_bf16_flops(gpu_name),
            state: State::Waiting,
        })
    }

    /// Called after each logged step, when the GPU is idle because the loss was read back. Starts the trace or ends it;
    /// returns the table when it ends.
    pub(super) fn after(&mut self, report: &StepReport) -> Option<String> {
        match std::mem::replace(&mut self.state, State::Done) {
            State::Waiting if report.step < self.first_traced => {
                self.state = State::Waiting;
                None
            }
            State::Waiting => match KernelTrace::start() {
                Ok(trace) => {
                    self.state = State::Tracing(trace, [report.step, report.tokens_seen]);
                    None
                }
                Err(error) => Some(format!("profile: {error}")),
            },
            State::Tracing(trace, [step, tokens]) => {
                // Stages differ in their tokens a step.
                let traced = [report.step - step, (report.tokens_seen - tokens) / self.num_processes];
                Some(match trace.finish() {
                    Ok(result) => self.table(&result, traced, report),
                    Err(error) => format!("profile: {error}"),
                })
            }
            State::Done => None,
        }
    }

    /// The printed table of traced `steps` with this process's `tokens`: each group of kernels with its rate, the
    /// kernels that took longest, and the longest idle times. Times and launches are of one step.
    fn table(&self, result: &TraceResult, [steps, tokens]: [u64; 2], report: &StepReport) -> String {
        let num_steps = steps as f64;
        let (span, busy) = (result.span_ns() as f64, result.busy_ns() as f64);
        let mut lines = vec![format!(
            "profile of {steps} steps: {:.2} ms a step on the GPU's clock, {:.1} % of it idle (1 - time in which a \
             kernel ran / span)",
            span / num_steps * 1e-6,
            100.0 * (1.0 - busy / span)
        )];
        let line = |total_ns: u64, count: usize, name: &str| {
            let share = 100.0 * total_ns as f64 / busy;
            format!(
                "{share:6.1} %  {:8.3}  {:8.0}  {name}",
                total_ns as f64 / num_steps * 1e-6,
                count as f64 / num_steps
            )
        };
        let totals = result.totals();
        lines.push("  share        ms  launches".to_owned());
        for (group, _) in GROUPS {
            let members = || totals.iter().filter(|total| group_of(&total.name) == group);
            let total_ns: u64 = members().map(|total| total.total_ns).sum();
            if total_ns > 0 {
                let rate = self.rate(group, total_ns as f64 * 1e-9, [steps, tokens], report);
                lines.push(line(total_ns, members().map(|total| total.count).sum(), &format!("{group}{rate}")));
            }
        }
        lines.push("  kernel by kernel".to_owned());
        let longest = totals.iter().take(LISTED);
        lines.extend(longest.map(|total| line(total.total_ns, total.count, &format!("{:.90}", total.name))));
        lines.push("  idle, by the kernel that ended it".to_owned());
        for gap in result.idle_before().iter().take(LISTED_GAPS) {
            let (ms, count) = (gap.total_ns as f64 / num_steps * 1e-6, gap.count as f64 / num_steps);
            lines.push(format!("           {ms:8.3}  {count:8.0}  {:.90}", gap.name));
        }
        lines.join("\n").trim_end().to_owned()
    }

    /// `: N TFLOP/s` or `: N GB/s` of a group that took `seconds` in `steps` steps with this process's `tokens`; empty
    /// where neither its operations nor its bytes are known. A step costs a forward pass and twice as much backward.
    fn rate(&self, group: &str, seconds: f64, [steps, tokens]: [u64; 2], report: &StepReport) -> String {
        let keys = report.attention.mean_active_keys;
        // Keys that a query sees, and keys up to it: density is the former over the latter.
        let flops = self.shape.flops_per_token(keys, keys / report.attention.density);
        let tokens = tokens as f64;
        match group {
            GEMMS => self.tflops(tokens * (3.0 * flops.linear), seconds),
            ATTENTION => {
                let attention = 3.0 * flops.attention + flops.index_scores + flops.index_gradient;
                self.tflops(tokens * attention, seconds)
            }
            OPTIMIZER => {
                // The bf16 weights and the masters' low bits, 2 bytes each, and two f32 moments are read and written,
                // the f32 gradient is read; the norm reads it once more.
                let parameters = (self.shape.parameters().total() / self.num_shards) as f64 * steps as f64;
                let bytes = parameters * (2.0 * (2.0 + 2.0 + 2.0 * 4.0) + 4.0 + 4.0);
                format!(": {:.0} GB/s", bytes / seconds * 1e-9)
            }
            _ => String::new(),
        }
    }

    /// The speed of `flops` operations in `seconds`, and its share of the peak.
    fn tflops(&self, flops: f64, seconds: f64) -> String {
        let achieved = flops / seconds;
        let share =
            self.peak_flops.map_or(String::new(), |peak| format!(", {:.0} % of the peak", 100.0 * achieved / peak));
        format!(": {:.0} TFLOP/s{share}", achieved * 1e-12)
    }
}

const GEMMS: &str = "GEMMs with weights";
const ATTENTION: &str = "attention";
const OPTIMIZER: &str = "AdamW and the gradient norm";

/// Groups of kernels with the beginnings of their names; after a `*`, any part of the name. The first group that fits
/// counts.
const GROUPS: [(&str, &[&str]); 10] = [
    (GEMMS, &["*nvjet", "*cublas", "*gemm", "*cutlass", "*splitK"]),
    (ATTENTION, &["attention_", "hopper_", "dma_attention", "nsa_"]),
    ("scores, selection and lists of DMA", &["dma_"]),
    ("norms and rotary positions", &["rms_norm", "qk_norm_rope", "column_sums"]),
    ("SwiGLU", &["swiglu"]),
    ("cross-entropy", &["cross_entropy", "scale"]),
    ("embedding", &["embedding"]),
    (OPTIMIZER, &["adamw", "sum_partials", "finish_sum"]),
    ("NCCL: reductions, gathers and exchanges, waiting included", &["*ncclDevKernel"]),
    ("the rest: residual gradients, copies, fills", &[""]),
];

/// The first of the [`GROUPS`] that a kernel's name fits.
fn group_of(kernel: &str) -> &'static str {
    let fits = |part: &&str| match part.strip_prefix('*') {
        Some(part) => kernel.contains(part),
        None => kernel.starts_with(part),
    };
    let found = GROUPS.iter().find(|(_, parts)| parts.iter().any(fits));
    found.map_or("", |(group, _)| group)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_have_groups() {
        for (kernel, group) in [
            ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "GEMMs with weights"),
            ("hopper_dma_attention_backward", "attention"),
            ("dma_attention_row_sums", "attention"),
            ("dma_select", "scores, selection and lists of DMA"),
            ("adamw", "AdamW and the gradient norm"),
            (
                "_Z43ncclDevKernel_ReduceScatter_Sum_f32_RING_LL24ncclDevKernelArgsStorageILm4096EE",
                "NCCL: reductions, gathers and exchanges, waiting included",
            ),
            ("kernel_binop_c_bf16_n_8", "the rest: residual gradients, copies, fills"),
        ] {
            assert_eq!(group_of(kernel), group, "{kernel}");
        }
    }

    #[test]
    fn a_run_must_reach_the_traced_steps() {
        let text = "[model]\nhidden_size = 32\nintermediate_size = 64\nnum_hidden_layers = 1\nnum_attention_heads = 2\n\
                    num_key_value_heads = 1\nhead_dim = 16\nmax_position_embeddings = 64\ntie_word_embeddings = true\n\
                    [attention]\nkind = \"mha\"\n[tokenizer]\npath = \"none\"\n[data]\npaths = [\"none\"]\n\
                    [training]\nsteps = 1\nseq_len = 32\nlocal_batch_size = 1\n[optimizer]\nlr = 1e-3\n\
                    [lr_scheduler]\nwarmup_steps = 0\ndecay_ratio = 0.0\n";
        let recipe = sieve_core::Recipe::load(text, "a test's recipe", &[]).expect("valid");
        let shape = recipe.model_shape(100).expect("it fits");
        let profile = |num_steps, steps| StepProfile::new(num_steps, steps, &shape, [1, 1], "NVIDIA H200");
        assert!(profile(3, 0..9).is_ok());
        let error = profile(3, 0..8).err().expect("too short").to_string();
        assert!(error.contains("step 9") && error.contains("ends at 8"), "{error}");
        assert!(profile(3, 100..105).is_err(), "a resumed run warms up too");
    }
}
