//! One op, one identifier on every floor, from one list of ops.
use crate::workspace;
use anyhow::Result;

/// Where an op has code of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Floor {
    /// `kernels/OP.cu` or `kernels/OP_forward.cu`.
    Cuda,
    /// `fn OP` or `fn OP_forward` of sieve-kernels.
    Launch,
    /// The same of sieve-cpu.
    Cpu,
}
use Floor::{Cpu, Cuda, Launch};

const ALL: &[Floor] = &[Cuda, Launch, Cpu];

/// The ops of sieve-ops, and the other floors that hold code for them. The rest goes through a library, through other
/// ops, or has no kernel there.
const OPS: &[(&str, &[Floor])] = &[
    ("linear", &[]),
    ("linear_add", &[]),
    ("linear_input_gradient", &[]),
    ("linear_weight_gradient", &[]),
    ("embedding", ALL),
    ("rms_norm", ALL),
    ("qk_norm_rope", ALL),
    ("swiglu", ALL),
    ("attention", ALL),
    ("dma_scores", ALL),
    ("dma_select", ALL),
    ("dma_attention", &[Cuda, Launch]),
    ("nsa_blocks", ALL),
    ("nsa_mean_pool", &[Launch, Cpu]),
    ("nsa_compressed_attention", &[Launch, Cpu]),
    ("nsa_selected_attention", ALL),
    ("nsa_gates", ALL),
    ("mla_pack", ALL),
    ("mla_attention", &[Cpu]),
    ("attention_decode", ALL),
    ("dma_decode", &[Cuda, Launch]),
    ("mla_decode", &[Cuda, Launch]),
    // The CPU's is sieve-select's, over slices.
    ("sparse_attention", &[Cuda, Launch]),
    ("has_sparse_attention", &[]),
    ("select_blocks", &[Launch]),
    ("correct_by_probes", &[Launch]),
    ("token_losses", &[Launch, Cpu]),
    ("linear_cross_entropy", &[Cpu]),
    ("linear_cross_entropy_with_gradients", &[Launch, Cpu]),
    ("scale", &[Cuda, Launch]),
    ("adamw", ALL),
    ("split_master", &[Cuda, Launch]),
    ("join_master", &[Launch]),
    ("sum_of_squares", &[Launch, Cpu]),
    ("global_norm", &[]),
    ("snapshot", &[]),
    ("snapshot_room", &[]),
];

/// What a method's name may end with beside its op.
const PASSES: &[&str] = &["_forward", "_backward", "_backward_with_output"];

/// Checks every floor against the list.
pub(crate) fn check(problems: &mut Vec<String>) -> Result<()> {
    let root = workspace::root();
    let (mut launches, mut cpu, mut methods, mut kernels) =
        (String::new(), String::new(), Vec::new(), Vec::new());
    for file in workspace::files()? {
        if let Some(name) = file.strip_prefix("kernels/") {
            kernels.push(name.trim_end_matches(".cu").to_owned());
        } else if file.starts_with("crates/sieve-kernels/src/") {
            launches.push_str(&workspace::read(&root.join(&file))?);
        } else if file.starts_with("crates/sieve-cpu/src/") {
            cpu.push_str(&workspace::read(&root.join(&file))?);
        } else if file.starts_with("crates/sieve-ops/src/") && file.ends_with("/backend.rs") {
            methods.extend(trait_methods(&workspace::read(&root.join(&file))?));
        }
    }
    for (op, floors) in OPS {
        if !methods.iter().any(|method| method == op) {
            problems.push(format!(
                "op {op}: no family of sieve-ops has a method of that name"
            ));
        }
        for floor in *floors {
            let (found, place) = match floor {
                Cuda => (
                    kernels.iter().any(|kernel| is_pass_of(kernel, op)),
                    "kernels/",
                ),
                Launch => (has_function(&launches, op), "sieve-kernels"),
                Cpu => (has_function(&cpu, op), "sieve-cpu"),
            };
            if !found {
                problems.push(format!("op {op}: {place} knows it by another name"));
            }
        }
    }
    for method in &methods {
        if !OPS.iter().any(|(op, _)| is_pass_of(method, op)) {
            problems.push(format!(
                "op {method}: not in the list of ops (crates/xtask/src/tidy/ops.rs)"
            ));
        }
    }
    Ok(())
}

/// Whether `name` is `op` or one of its passes.
fn is_pass_of(name: &str, op: &str) -> bool {
    let rest = name.strip_prefix(op);
    rest.is_some_and(|rest| rest.is_empty() || PASSES.contains(&rest))
}

fn has_function(code: &str, op: &str) -> bool {
    let names = code.split("pub fn ").skip(1);
    let mut names = names.filter_map(|rest| rest.split(['(', '<']).next());
    names.any(|name| is_pass_of(name, op))
}

/// Methods that a file's traits declare: `fn` at one level of indentation, without a body.
fn trait_methods(code: &str) -> Vec<String> {
    let mut methods = Vec::new();
    let mut in_trait = false;
    for line in code.lines() {
        if line.starts_with("pub trait ") {
            in_trait = true;
        } else if line.starts_with('}') {
            in_trait = false;
        } else if let Some(rest) = line.strip_prefix("    fn ").filter(|_| in_trait) {
            methods.extend(rest.split(['(', '<']).next().map(str::to_owned));
        }
    }
    methods
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_belong_to_their_op_and_other_ops_do_not() {
        assert!(is_pass_of("swiglu", "swiglu"));
        assert!(is_pass_of("swiglu_backward_with_output", "swiglu"));
        assert!(!is_pass_of("linear_add", "linear"));
        assert!(has_function("pub fn dma_select(z: &T) {", "dma_select"));
        assert!(!has_function("pub fn dma_expire(z: &T) {", "dma_select"));
        assert!(!has_function("fn dma_select(z: &T) {", "dma_select"));
    }

    #[test]
    fn methods_of_traits_alone_are_read() {
        let code = [
            "impl X {",
            "    fn not_this() {}",
            "}",
            "pub trait T {",
            "    fn one(",
            "        x: u8,",
            "    );",
            "    fn two();",
            "}",
        ]
        .join("\n");
        assert_eq!(trait_methods(&code), ["one", "two"]);
    }

    #[test]
    fn this_repository_keeps_the_rule() {
        let mut problems = Vec::new();
        check(&mut problems).expect("the files can be read");
        assert!(problems.is_empty(), "{problems:#?}");
    }
}
