//! One op, one identifier on every floor. The ops are the methods of the backend traits of sieve-ops.
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

/// The floors of the ops that are not on all of them. The rest goes through a library, through other ops, or has no
/// kernel there.
const FLOORS: &[(&str, &[Floor])] = &[
    ("attention_layer", &[]),
    ("feed_forward", &[]),
    ("dynamic_mask_attention", &[]),
    ("seed_gradient", &[]),
    ("linear", &[]),
    ("linear_add", &[]),
    ("linear_input_gradient", &[]),
    ("linear_weight_gradient", &[]),
    ("fp8_linear", &[]),
    ("fp8_swiglu", &[]),
    ("dma_attention", &[Cuda, Launch]),
    ("dma_last_kept", &[Cuda, Launch]),
    ("dma_border_keys", &[Cuda, Launch]),
    ("exchange", &[]),
    ("all_to_all", &[]),
    ("nsa_mean_pool", &[Launch, Cpu]),
    ("nsa_compressed_attention", &[Launch, Cpu]),
    ("mla_attention", &[Cpu]),
    ("cached_attention", &[]),
    ("dma_decode", &[Cuda, Launch]),
    // The CPU's is sieve-select's, over slices.
    ("sparse_attention", &[Cuda, Launch]),
    ("has_sparse_attention", &[]),
    ("select_blocks", &[Launch]),
    ("correct_by_probes", &[Launch]),
    ("keep_heavy_keys", &[Launch]),
    ("heavy_decode", &[Launch]),
    ("token_losses", &[Launch, Cpu]),
    ("linear_cross_entropy", &[Cpu]),
    ("linear_cross_entropy_with_gradients", &[Launch, Cpu]),
    ("scale", &[Cuda, Launch]),
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
    let (mut launches, mut cpu, mut methods, mut kernels) = (String::new(), String::new(), Vec::new(), Vec::new());
    for file in workspace::files()? {
        if let Some(name) = file.strip_prefix("kernels/") {
            kernels.push(name.trim_end_matches(".cu").to_owned());
        } else if file.starts_with("crates/sieve-kernels/src/") {
            launches.push_str(&workspace::read(&file)?);
        } else if file.starts_with("crates/sieve-cpu/src/") {
            cpu.push_str(&workspace::read(&file)?);
        } else if file.starts_with("crates/sieve-ops/src/") && file.ends_with(".rs") {
            methods.extend(trait_methods(&workspace::read(&file)?));
        }
    }
    let mut ops: Vec<&str> = methods.iter().map(|method| op_of(method)).collect();
    ops.extend(FLOORS.iter().map(|(op, _)| *op));
    ops.sort_unstable();
    ops.dedup();
    for op in ops {
        if !methods.iter().any(|method| method == op) {
            problems.push(format!("op {op}: no family of sieve-ops has a method of that name"));
        }
        let row = FLOORS.iter().find(|(of, _)| *of == op);
        for floor in row.map_or(ALL, |(_, floors)| floors) {
            let (found, place) = match floor {
                Cuda => (kernels.iter().any(|kernel| is_pass_of(kernel, op)), "kernels/"),
                Launch => (has_function(&launches, op), "sieve-kernels"),
                Cpu => (has_function(&cpu, op), "sieve-cpu"),
            };
            if !found {
                problems.push(format!(
                    "op {op}: {place} knows it by another name (or has none: crates/xtask/src/tidy/ops.rs)"
                ));
            }
        }
    }
    Ok(())
}

/// The op that a method computes a pass of.
fn op_of(method: &str) -> &str {
    let end = method.find("_backward").unwrap_or(method.len());
    &method[..end]
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

/// Methods that a file's backend traits declare: `fn` at one level of indentation, without a body.
fn trait_methods(code: &str) -> Vec<String> {
    let mut methods = Vec::new();
    let mut in_trait = false;
    for line in code.lines() {
        if let Some(rest) = line.strip_prefix("pub trait ") {
            let name = rest.split([':', '<', ' ']).next().unwrap_or(rest);
            in_trait = name.ends_with("Backend") || name.ends_with("Gradients");
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
        assert_eq!(op_of("swiglu_backward_with_output"), "swiglu");
        assert_eq!(op_of("swiglu"), "swiglu");
        assert!(has_function("pub fn dma_select(z: &T) {", "dma_select"));
        assert!(!has_function("pub fn dma_expire(z: &T) {", "dma_select"));
        assert!(!has_function("fn dma_select(z: &T) {", "dma_select"));
    }

    #[test]
    fn methods_of_backend_traits_alone_are_read() {
        let code = [
            "impl X {",
            "    fn not_this() {}",
            "}",
            "pub trait Links {",
            "    fn nor_this();",
            "}",
            "pub trait TBackend: Backend {",
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
