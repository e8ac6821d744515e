//! The last lines of a run: its losses, their curve, and the next commands.
use super::lines::mean_of;
use super::log::Log;
use sieve_core::{ModelShape, Recipe, ShownPath};
use sieve_data::{Prepared, Tokenizer};
use sieve_host::ask::Ask;
use sieve_host::{terminal, text_files};
use sieve_ops::DMA_SCORE_CLAMP;
use sieve_train::{BestCheckpoint, RunFolder, TrainSummary, TrainingData, ValidationReport, best_checkpoint};

/// Tokens of held-out text that the suggested prompt has, at most.
const PROMPT_TOKENS: usize = 12;

/// Prints the ops that ran as their reference.
pub(super) fn tell_references(log: &Log) {
    for line in sieve_host::paths::reference_lines() {
        log.line(&line);
    }
}

/// Prints a finished run's losses and statistics of its masks.
pub(super) fn finish(log: &Log, summary: &TrainSummary, shape: &ModelShape) {
    if let (Some(first), Some(last)) = (&summary.first_validation, &summary.last_validation) {
        let row = |name: &str, report: &ValidationReport| {
            format!(
                "{name:<9}{:>8}   {:>10}   {:>13}\n",
                mean_of(report.num_labels, format!("{:.4}", report.loss)),
                mean_of(report.num_labels, terminal::perplexity(report.perplexity, 2)),
                mean_of(report.num_bytes, format!("{:.4}", report.bits_per_byte)),
            )
        };
        let unigram = last.unigram_bits_per_byte;
        log.result(&format!(
            "             loss   perplexity   bits per byte\n{}{}\
             unigram                          {:>10}   (end / unigram = {})",
            row("start", first),
            row("end", last),
            mean_of(last.num_bytes, format!("{unigram:.4}")),
            mean_of(last.num_bytes, format!("{:.3}", last.bits_per_byte / unigram)),
        ));
    }
    // Dense attention has only the causal mask: there is nothing to report of it.
    if let Some(step) = &summary.last_step
        && shape.num_layers_of_dense_attention() < shape.num_layers
    {
        let attention = &step.attention;
        let keys = format!("mask: density {:.3}, {:.1} keys a query", attention.density, attention.mean_active_keys);
        let clamped = attention.clamped.map_or(String::new(), |share| {
            format!(", {:.1} % of scores above the bias's clamp of {DMA_SCORE_CLAMP}", 100.0 * share)
        });
        // `ages` is there only for a learned mask, which can hide a key from all queries.
        log.line(&match attention.ages {
            None => keys,
            Some(_) => format!(
                "{keys}, {:.1} % of keys never seen, {:.1} % of queries that see their own key in no head{clamped}",
                100.0 * attention.never_active,
                100.0 * attention.not_self_visible,
            ),
        });
        if let Some(ages) = attention.ages {
            log.line(&format!(
                "kept keys: half at most {} tokens old, 95 % at most {}; {:.1} % are not in a sliding window as large",
                terminal::thousands(ages.median_key_age),
                terminal::thousands(ages.late_key_age),
                100.0 * ages.beyond_window,
            ));
        }
    }
}

/// Prints the curve of the run's losses, and which checkpoint is the best one where the run keeps it.
pub(super) fn curve(log: &Log, recipe: &Recipe, folder: &RunFolder) {
    if !log.prints() {
        return;
    }
    if let Some(curve) = super::curve::of_run(folder) {
        log.line(&curve);
    }
    if let Some(best) = kept_best(recipe, folder) {
        let (path, step) = (best.path.shown(), best.step);
        log.line(&format!("best checkpoint: {path}, loss {:.4} on held-out text at step {step}", best.loss));
    }
}

/// The best checkpoint of a run that keeps it. The run has ended well, so files that cannot be read now are no error.
fn kept_best(recipe: &Recipe, folder: &RunFolder) -> Option<BestCheckpoint> {
    let keeps = recipe.checkpoint.keep_best;
    keeps.then(|| best_checkpoint(folder)).and_then(Result::ok).flatten()
}

/// Prints the commands that a user may run next, with the best checkpoint of a run that keeps it, else with the last.
pub(super) fn next_steps(log: &Log, recipe: &Recipe, summary: &TrainSummary, data: &TrainingData, folder: &RunFolder) {
    let Some(last) = &summary.checkpoint else {
        return;
    };
    let best = kept_best(recipe, folder).map(|best| best.path);
    let (checkpoint, out) = (terminal::quoted(best.as_ref().unwrap_or(last)), folder.path());
    let mut commands = match data.prepared() {
        Some(prepared) => {
            let is_chat = recipe.data.messages_column.is_some();
            let prompt = recipe.generation.prompts.first().cloned();
            // The text of a chat begins with what its template writes, not with a message.
            let prompt = prompt.or_else(|| held_out_words(prepared, &data.tokenizer).filter(|_| !is_chat));
            let ask = Ask::with(is_chat, prompt.as_deref());
            vec![ask.command(), "eval ppl --recipe-validation".to_owned()]
        }
        None => vec!["eval mqar".to_owned()],
    };
    commands.push("export --out exported".to_owned());
    let commands = commands.into_iter();
    let commands = commands.map(|command| format!("{command} --checkpoint {checkpoint}"));
    let commands = commands.chain([format!("compare {}", terminal::quoted(out))]);
    log.line(&terminal::next(&commands.collect::<Vec<_>>()));
    log.line(&format!("curves: tensorboard --logdir {}", terminal::quoted(&out.join("tb"))));
}

/// The first words of the first held-out document; of one with a prompt, the prompt.
fn held_out_words(prepared: &Prepared, tokenizer: &Tokenizer) -> Option<String> {
    let shard = prepared.validation().ok()?;
    let tokens = shard.document(0).ok()?;
    let prompt = shard.predicted(0).first().map_or(0, |predicted| predicted.start as usize);
    let decode = |num_tokens: usize| tokenizer.decode(&tokens[..tokens.len().min(num_tokens)]).ok();
    match prompt {
        0 => text_files::first_words(&decode(PROMPT_TOKENS)?, 2 * PROMPT_TOKENS),
        prompt => decode(prompt),
    }
}
