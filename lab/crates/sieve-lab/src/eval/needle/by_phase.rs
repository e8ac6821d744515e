//! `sieve eval needle --phases`: each needle at every position modulo a period.
use super::{NeedleArgs, haystack, head};
use crate::draw::phases::{self, Column, Row};
use crate::eval::phases::{Scored, period, print_legend};
use anyhow::{Result, bail};
use serde_json::json;
use sieve_core::ShownPath;
use sieve_data::Tokenizer;
use sieve_eval::{NUM_DISTRACTORS, NeedleConfig, NeedlePhases, needle_by_phase};
use sieve_hf::LoadedModel;
use sieve_host::evaluation::{output, so_far};
use sieve_host::{selector, terminal};
use sieve_infer::{Selection, TaskModel};
use sieve_ops::DeviceBackend;

/// Name under which `--save` keeps the result.
pub(super) const COMMAND: &str = "needle_phases";
/// Needles of each length and depth without `--needles`.
const NUM_NEEDLES: usize = 16;
/// Tokens of a text without `--lengths`, at most; a model's context may be shorter.
pub(super) const LENGTH: usize = 1024;
/// Percent of the haystack before the needles without `--depths`.
const DEPTH: f64 = 50.0;
/// Questions of all methods together, at most.
const MOST_QUESTIONS: usize = 1_000_000;
/// What the scores are means of.
const ROWS: &str = "needles";

/// One length, one depth and sixteen needles, where the flags name none.
fn config(args: &NeedleArgs, context: usize) -> NeedleConfig {
    let lengths = if args.lengths.is_empty() { vec![LENGTH.min(context)] } else { args.lengths.clone() };
    let depths = if args.depths.is_empty() { vec![DEPTH] } else { args.depths.clone() };
    let num_needles = args.needles.unwrap_or(NUM_NEEDLES);
    NeedleConfig { lengths, depths, num_needles, buffer: args.buffer, seed: args.seed }.sorted()
}

/// Asks for all needles at every phase, with the model's own attention and with each selector; prints the result and
/// draws it.
pub(super) fn run_on<B: DeviceBackend>(
    args: &NeedleArgs,
    asked: Option<usize>,
    (loaded, tokenizer): &(LoadedModel<B>, Tokenizer),
    device: &B::Device,
) -> Result<()> {
    let config = config(args, loaded.shape.max_seq_len);
    config.check(loaded.shape.max_seq_len)?;
    let selections = args.sparse.own_and_each(&loaded.shape)?;
    let period = period(asked, &loaded.shape, &selections)?;
    config.check_period(period)?;
    let num_cells = config.lengths.len() * config.depths.len();
    let per_method = config.num_needles.saturating_mul(num_cells).saturating_mul(period);
    let total = per_method.saturating_mul(selections.len());
    if total > MOST_QUESTIONS {
        bail!(
            "{} needles for each of {num_cells} lengths and depths, at {period} phases and with {} methods, are \
             {total} questions\n  hint: ask for {MOST_QUESTIONS} at most: fewer --needles or --phases",
            config.num_needles,
            selections.len()
        );
    }
    let haystack = haystack(args, config.haystack_tokens_of(period), tokenizer)?;
    let model = TaskModel { model: &loaded.model, tokenizer, ends: &loaded.end_ids(tokenizer.eos_id()?)?, device };
    let reports = so_far::with_bar(total as u64, "questions", |bar| {
        let ask = |(n, selection): (usize, &Option<Selection>)| {
            let mut observe = |done: usize, num_found: usize| {
                bar.set_position((n * per_method + done) as u64);
                let whole = done / period * period;
                if whole > 0 {
                    let method =
                        selection.as_ref().map_or(String::new(), |selection| format!("{}: ", selection.selectors()));
                    so_far::now(format!("{method}{num_found} of {whole} questions answered"));
                }
            };
            needle_by_phase(&model, &haystack, &config, period, selection.as_ref(), &mut observe)
        };
        selections.iter().enumerate().map(ask).collect::<Result<Vec<_>, _>>()
    })?;
    print(args, loaded, &config, period, &reports)?;
    if let Some(path) = &args.plot {
        path.write_text(&picture(loaded, &config, period, &reports))?;
        if !args.result.json {
            terminal::line(&format!("wrote {}", path.shown()));
        }
    }
    Ok(())
}

/// The three scores of a method, as they are written.
fn scores(report: &NeedlePhases) -> [Scored<'_>; 3] {
    [
        Scored { name: "found", gap: &report.found, factor: 100.0, unit: " %", digits: 1 },
        Scored { name: "rank", gap: &report.rank, factor: 1.0, unit: "", digits: 2 },
        Scored { name: "log-likelihood", gap: &report.log_likelihood, factor: 1.0, unit: "", digits: 3 },
    ]
}

/// Prints, for each method, its scores at the best and the worst phase, the gap and chance; or one JSON object.
fn print<B: DeviceBackend>(
    args: &NeedleArgs,
    loaded: &LoadedModel<B>,
    config: &NeedleConfig,
    period: usize,
    reports: &[NeedlePhases],
) -> Result<()> {
    let mut json = head(args, loaded);
    json["lengths"] = json!(config.lengths);
    json["depths"] = json!(config.depths);
    json["period"] = json!(period);
    json["methods"] = json!(reports);
    if args.result.report(loaded, COMMAND, json)? {
        return Ok(());
    }
    let counted = |count: usize, noun| terminal::counted(count as u64, noun);
    terminal::line(&format!(
        "{}, {}; {} by {}, {} of each, asked at {period} phases\n\
         phase: position of the number's first token modulo {period}; found: the number is in the greedy continuation\n\
         rank: of its likelihood among {NUM_DISTRACTORS} others, 1 is best, a guess {}; log-likelihood: in nats per \
         token",
        output::heading(loaded),
        output::trained_words(loaded),
        counted(config.lengths.len(), "length"),
        counted(config.depths.len(), "depth"),
        counted(config.num_needles, "needle"),
        reports.first().map_or(0.0, |report| report.chance_rank),
    ));
    print_legend(ROWS);
    for report in reports {
        let name = selector::method(report.selector.as_deref(), &loaded.shape);
        let density = report.density.map_or(String::new(), |x| format!(", {:.1} % of the pairs", 100.0 * x));
        terminal::line(&format!("\n{name}{density}"));
        for score in scores(report) {
            score.print();
        }
        if !report.paths.is_empty() {
            terminal::line(&selector::paths(&report.paths));
        }
    }
    Ok(())
}

/// Found and log-likelihood by phase, a row for each method.
fn picture<B: DeviceBackend>(
    loaded: &LoadedModel<B>,
    config: &NeedleConfig,
    period: usize,
    reports: &[NeedlePhases],
) -> String {
    let columns = [
        Column { name: "found, %", range: 0.0..1.0, factor: 100.0 },
        Column { name: "log-likelihood", range: 0.0..0.0, factor: 1.0 },
    ];
    let row = |report| {
        let [found, _, likelihood] = scores(report);
        Row {
            name: selector::method(report.selector.as_deref(), &loaded.shape),
            says: [&found, &likelihood].map(|score| score.in_short()).to_vec(),
            gaps: vec![found.gap, likelihood.gap],
        }
    };
    let rows: Vec<Row<'_>> = reports.iter().map(row).collect();
    let lengths: Vec<String> = config.lengths.iter().map(usize::to_string).collect();
    let title = format!("Needles by phase: {}, {} tokens", output::model_name(loaded), lengths.join(", "));
    phases::svg(&title, ROWS, period, &columns, &rows)
}
