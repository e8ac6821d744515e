//! What the program says of a model's attention, against masks that are counted key by key.
use crate::tiny_run::{TinyRun, refused, succeed};
use std::collections::BTreeSet;
use std::fs;

/// Tokens of a training row of the tiny recipe.
const ROW: usize = 32;

/// Tokens that attention keeps for a query: fewer than a row has, as many, and more.
const KEPT: [usize; 3] = [8, 32, 40];

/// A kind of attention with a form, as recipes name it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Mha,
    Mla,
    Swa,
    DmaPublished,
    DmaSlope,
    NsaWindow,
    NsaBlocks,
    InfllmV2,
    Moba,
    Msa,
}

const FORMS: [Form; 10] = [
    Form::Mha,
    Form::Mla,
    Form::Swa,
    Form::DmaPublished,
    Form::DmaSlope,
    Form::NsaWindow,
    Form::NsaBlocks,
    Form::InfllmV2,
    Form::Moba,
    Form::Msa,
];

/// Tokens of a chosen block.
const BLOCK: usize = 4;

/// The keys that each query of a row reads, `[query][key]`.
type Mask = Vec<BTreeSet<usize>>;

impl Form {
    /// The lines of `[attention]` in which a query keeps `kept` tokens.
    fn lines(self, kept: usize) -> String {
        let (blocks, compress) = (kept / BLOCK, "compress_stride = 2\ncompress_block_size = 4");
        let chosen = format!("select_block_size = {BLOCK}\nnum_selected_blocks = {blocks}");
        match self {
            Self::Mha => "kind = \"mha\"".to_owned(),
            Self::Mla => "kind = \"mla\"".to_owned(),
            Self::Swa => format!("kind = \"swa\"\nsliding_window = {kept}"),
            Self::DmaPublished => {
                format!(
                    "kind = \"dma\"\nkeep_window_size = {kept}\nbias = \"exp\"\n\
                     recency = \"none\"\nlocal_window_size = 0"
                )
            }
            Self::DmaSlope => format!(
                "kind = \"dma\"\nkeep_window_size = {kept}\nbias = \"linear\"\nrecency = \"slope\"\n\
                 local_window_size = 2\n\
                 longest_period = 96.0"
            ),
            Self::NsaWindow => format!(
                "kind = \"nsa\"\n{compress}\nselect_block_size = {BLOCK}\nnum_selected_blocks = 3\nwindow_size = {kept}"
            ),
            Self::NsaBlocks => format!("kind = \"nsa\"\n{compress}\n{}\nwindow_size = 4", chosen_at_least_3(kept)),
            Self::InfllmV2 => format!("kind = \"infllm_v2\"\n{compress}\n{chosen}\nnum_local_blocks = 1"),
            Self::Moba => format!("kind = \"moba\"\n{chosen}"),
            Self::Msa => format!("kind = \"msa\"\n{chosen}\nnum_local_blocks = 2"),
        }
    }

    /// The branch of each mask, by name, with the number of its (query, key) pairs; `false` for means of keys.
    fn branches(self, kept: usize, row: usize) -> Vec<(&'static str, usize, bool)> {
        let count = |mask: Mask| mask.iter().map(BTreeSet::len).sum::<usize>();
        let nsa = |blocks: usize, window: usize| {
            vec![
                ("selected", count(chosen(row, blocks, true, 2)), true),
                ("window", count(last(row, window)), true),
                ("compressed", compressed_pairs(row), false),
            ]
        };
        let only = |mask: Mask| vec![("", count(mask), true)];
        match self {
            Self::Mha | Self::Mla => only(last(row, row)),
            Self::Swa => only(last(row, kept)),
            Self::DmaPublished => only(ranked(row, kept, 0)),
            Self::DmaSlope => only(ranked(row, kept, 2)),
            Self::NsaWindow => nsa(3, kept),
            Self::NsaBlocks => nsa((kept / BLOCK).max(3), 4),
            Self::InfllmV2 => only(chosen(row, kept / BLOCK, true, 1)),
            Self::Moba => only(chosen(row, kept / BLOCK, false, 1)),
            Self::Msa => only(chosen(row, kept / BLOCK, false, 2)),
        }
    }

    /// The swept key and its values at which a query keeps at least a row.
    fn sweep(self) -> Option<(&'static str, [String; 2])> {
        let key = match self {
            Self::Mha | Self::Mla => return None,
            Self::Swa => "sliding_window",
            Self::DmaPublished | Self::DmaSlope => "keep_window_size",
            Self::NsaWindow => "window_size",
            Self::NsaBlocks | Self::InfllmV2 | Self::Moba | Self::Msa => "num_selected_blocks",
        };
        let is_count = key == "num_selected_blocks";
        Some((key, [32, 40].map(|kept| if is_count { kept / BLOCK } else { kept }.to_string())))
    }
}

fn chosen_at_least_3(kept: usize) -> String {
    format!("select_block_size = {BLOCK}\nnum_selected_blocks = {}", (kept / BLOCK).max(3))
}

/// A number that differs for each query and key: which keys score best does not matter for how many are read.
fn score(query: usize, key: usize) -> usize {
    (query * 7919 + key * 104_729 + 13) % 1009
}

/// A query reads the last `window` keys up to its own.
fn last(row: usize, window: usize) -> Mask {
    (0..row).map(|query| (0..=query).filter(|key| query - key < window).collect()).collect()
}

/// A query reads the last `local` keys and, of the keys before these, the keys of highest rank, `kept` in all. A key
/// has one rank, whoever asks.
fn ranked(row: usize, kept: usize, local: usize) -> Mask {
    let read = (0..row).map(|query| {
        let mut keys: Vec<usize> = (0..=query).collect();
        keys.sort_by_key(|&key| (query - key >= local, std::cmp::Reverse((score(0, key), key))));
        keys.into_iter().take(kept).collect()
    });
    read.collect()
}

/// A query reads the tokens up to its own of `count` blocks: the document's first block if `first`, the last `local`
/// blocks up to the query's own, and the blocks with the highest scores.
fn chosen(row: usize, count: usize, first: bool, local: usize) -> Mask {
    let read = (0..row).map(|query| {
        let own = query / BLOCK;
        let is_forced = |block: usize| (first && block == 0) || own - block < local;
        let mut blocks: Vec<usize> = (0..=own).collect();
        blocks.sort_by_key(|&block| (!is_forced(block), std::cmp::Reverse(score(query, block))));
        let blocks = blocks.into_iter().take(count);
        blocks.flat_map(|block| block * BLOCK..(block + 1) * BLOCK).filter(|&key| key <= query).collect()
    });
    read.collect()
}

/// (Query, mean) pairs of means of 4 keys every 2, of which a query reads those that have ended.
fn compressed_pairs(row: usize) -> usize {
    (0..row).map(|query| (0..row).step_by(2).filter(|first| first + 4 <= query + 1).count()).sum()
}

/// What a model's line says of the rows of one stage.
#[derive(Debug)]
struct Said {
    densities: Vec<(String, f64)>,
    row: usize,
    covers: bool,
}

/// Reads every `density A NAME + B NAME on rows of N (attends …)` of the line.
fn said(line: &str) -> Vec<Said> {
    let clauses = line.split("density ").skip(1);
    let parsed = clauses.map(|clause| {
        let (densities, rest) = clause.split_once(" on rows of ").unwrap_or_else(|| panic!("{line}"));
        let densities = densities.split(" + ").map(|one| {
            let (number, name) = one.split_once(' ').unwrap_or((one, ""));
            (name.to_owned(), number.parse().unwrap_or_else(|_| panic!("{line}")))
        });
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        let row: usize = digits.parse().unwrap_or_else(|_| panic!("{line}"));
        let covers = rest.contains(&format!("attends to every key of rows of {row} tokens: dense attention"));
        Said { densities: densities.collect(), row, covers }
    });
    parsed.collect()
}

/// Asserts that a line says of each stage, in order, what the masks hold.
fn check(form: Form, kept: usize, rows: &[usize], line: &str) {
    let found = said(line);
    let mut expected = rows.to_vec();
    expected.dedup();
    assert_eq!(found.iter().map(|one| one.row).collect::<Vec<_>>(), expected, "{form:?} {kept}: {line}");
    for one in found {
        let causal = one.row * (one.row + 1) / 2;
        let branches = form.branches(kept, one.row);
        assert_eq!(one.densities.len(), branches.len(), "{line}");
        for ((name, density), (branch, pairs, _)) in one.densities.iter().zip(&branches) {
            let counted = *pairs as f64 / causal as f64;
            assert!(
                name == branch && (density - counted).abs() < 6e-4,
                "{form:?} {kept}: {counted} of {branch}: {line}"
            );
            assert_eq!(*density == 1.0, *pairs == causal, "{line}");
        }
        let hides = !matches!(form, Form::Mha | Form::Mla);
        let reads_all = branches.iter().any(|(_, pairs, of_tokens)| *of_tokens && *pairs == causal);
        assert_eq!(one.covers, hides && reads_all, "{form:?} {kept}: {line}");
    }
}

/// The line after `model: ` in what a command printed.
fn model_line(printed: &str) -> &str {
    let lines = printed.lines().map(|line| line.trim_start_matches("# "));
    let mut lines = lines.filter_map(|line| line.strip_prefix("model: "));
    lines.next().unwrap_or_else(|| panic!("no model line: {printed}"))
}

/// A folder with the recipe of a form in it, of three steps; with `stages`, a stage of two steps and a stage of shorter
/// rows.
fn run_of(form: Form, kept: usize, stages: bool) -> TinyRun {
    let run = TinyRun::new(&form.lines(kept));
    let mut recipe = run.read("tiny.toml");
    if form == Form::Mla {
        recipe = recipe.replace("num_key_value_heads = 1", "num_key_value_heads = 2");
    }
    recipe = recipe.replace("warmup_steps = 4", "warmup_steps = 1");
    recipe = if stages {
        let stages = "[[stage]]\nsteps = 2\n\n[[stage]]\nsteps = 1\nseq_len = 16\n\n[optimizer]";
        recipe.replace("steps = 40\n", "").replace("[optimizer]", stages)
    } else {
        recipe.replace("steps = 40\n", "steps = 3\n")
    };
    run.write("tiny.toml", recipe);
    run
}

#[test]
fn the_model_line_says_what_the_masks_hold() {
    let mut num_checked = 0;
    for form in FORMS {
        for kept in KEPT {
            let run = run_of(form, kept, false);
            let plan = run.prints("plan --recipe tiny.toml");
            check(form, kept, &[ROW], model_line(&plan));
            let trained = succeed(&mut run.train("out", ""));
            check(form, kept, &[ROW], model_line(&trained));
            // The rows of validations are as long as the training's, and one line is printed, stored and shown.
            let line = model_line(&trained);
            assert_eq!(model_line(&run.read("out/config.toml")), line);
            assert!(line.ends_with("f32, weights random, seed 3"), "{line}");
            let warned = trained.contains("dense attention\n");
            assert_eq!(plan.contains("warning: "), warned, "{plan}");
            run.prints("compare out --out page.html");
            assert!(run.read("page.html").contains(&format!("<td>{line}</td>")), "{line}");
            num_checked += 2;
            // Evaluated on rows of another length.
            for context in [8, 16, 32] {
                let printed =
                    run.prints(&format!("eval ppl --checkpoint out --data corpus --context {context} --max-tokens 99"));
                check(form, kept, &[ROW], model_line(&printed));
                let covers =
                    printed.contains(&format!("--context {context}: attention attends to every key of rows of"));
                let causal = context * (context + 1) / 2;
                let branches = form.branches(kept, context);
                let all = branches.iter().any(|(_, pairs, of_tokens)| *of_tokens && *pairs == causal);
                let hides = !matches!(form, Form::Mha | Form::Mla);
                assert_eq!(covers, context != ROW && hides && all, "{form:?} {kept} {context}: {printed}");
                num_checked += 1;
            }
        }
    }
    assert_eq!(num_checked, FORMS.len() * KEPT.len() * 5);
}

#[test]
fn every_stage_is_said_with_its_rows() {
    for form in FORMS {
        for kept in KEPT {
            let run = run_of(form, kept, true);
            let plan = run.prints("plan --recipe tiny.toml");
            check(form, kept, &[ROW, 16], model_line(&plan));
            let trained = succeed(&mut run.train("out", ""));
            check(form, kept, &[ROW, 16], model_line(&trained));
            for (number, row) in [(1, ROW), (2, 16)] {
                let hides = !matches!(form, Form::Mha | Form::Mla);
                let words = format!(" in stage {number}: attention attends to every key of rows of {row} tokens");
                for printed in [&plan, &trained] {
                    assert_eq!(printed.contains(&words), hides && kept >= row, "{form:?} {kept}: {printed}");
                }
            }
        }
    }
}

#[test]
fn a_sweep_in_which_no_value_hides_a_key_is_refused() {
    let mut num_refused = 0;
    for form in FORMS {
        let Some((key, [equal, more])) = form.sweep() else { continue };
        let run = run_of(form, KEPT[0], false);
        let sweep = format!("--sweep attention.{key}={equal},{more}");
        let message = run.unchanged(|| {
            refused(
                &mut run.train("out", &sweep),
                "no value hides a key | attends to every key of rows of 32 tokens: dense attention | hint: ",
            )
        });
        assert!(message.contains(&format!("--sweep attention.{key}")), "{message}");
        num_refused += 1;
        // Rows of 64 tokens have keys to hide.
        if form == Form::Swa {
            succeed(&mut run.train("longer", &format!("{sweep} --set training.seq_len=64")));
            let shorter = format!("--sweep attention.{key}=8,{equal}");
            let printed = succeed(&mut run.train("one", &shorter));
            let words = format!("attention.{key} is 32: attention attends to every key");
            assert_eq!(printed.matches(&words).count(), 1, "{printed}");
            assert!(printed.contains(&format!("in attention.{key}={equal}")), "{printed}");
            assert!(printed.contains("one seed: ") && !printed.contains("best:"), "{printed}");
        }
    }
    assert_eq!(num_refused, 8);
    // A sweep of dense kinds is run; a sweep of a dense kind and of a kind that hides no key is refused.
    let run = run_of(Form::Mha, 0, false);
    refused(
        &mut run.train("out", "--sweep attention.kind=mha,swa --set attention.sliding_window=32"),
        "no value hides",
    );
    assert!(!fs::exists(run.path("out")).unwrap_or(true), "nothing was written");
    succeed(&mut run.train("dense", "--sweep attention.kind=mha,mla"));
}
