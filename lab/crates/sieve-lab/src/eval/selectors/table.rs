//! The measured rows as printed lines and as one JSON object.
use super::compare::Trained;
use super::run::{COMMAND, Failures, Run};
use anyhow::Result;
use serde::Serialize;
use sieve_eval::{BlockAgreement, SelectorMeasure};
use sieve_host::evaluation::output;
use sieve_host::{selector, terminal};
use sieve_ops::DeviceBackend;

/// One row of the printed table.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    /// The selector in the form that `--selector` reads.
    pub(super) label: String,
    #[serde(flatten)]
    pub(super) measure: SelectorMeasure,
}

/// Writes everything as one JSON object, for `--json` and `--save`.
pub(super) fn report<B: DeviceBackend>(
    run: &Run<'_, B>,
    rows: &[Row],
    trained: &[Trained],
    left_out: &[anyhow::Error],
    (agreement, failed): (&[BlockAgreement], &Failures),
) -> Result<()> {
    let mut json = serde_json::json!({
        "data": run.args.data,
        "threads": sieve_host::device::num_threads(),
        "selectors": rows,
        "trained": trained,
        "left_out": left_out.iter().map(terminal::first_line).collect::<Vec<_>>(),
        "failed": failed,
    });
    if run.args.agreement {
        json["agreement"] = serde_json::json!(agreement);
    }
    run.args.result.report(run.loaded, COMMAND, json)?;
    Ok(())
}

/// Prints a legend, then a table for each length.
pub(super) fn print<B: DeviceBackend>(run: &Run<'_, B>, rows: &[Row], trained: &[Trained], left_out: &[anyhow::Error]) {
    let args = run.args;
    let chunks = match args.chunk {
        Some(chunk) => format!(", read in chunks of {chunk} tokens"),
        None => String::new(),
    };
    terminal::line(&format!(
        "{}, {} prompts of each length{chunks}, {}\n\
         density: computed pairs over causal pairs, probes included; error: of the layers' output; select and \
         attention ms:\n\
         all layers of one prompt; prefill ms: the whole model without its head, the fastest prompt; loss: nats\n\
         per token, * where it is no likelihood (prefill loss); KL: of the predictions from the dense ones, nats per\n\
         token; top-1: the likeliest token is the dense one; cosine: of the last block's output to the dense one",
        output::heading(run.loaded),
        args.windows,
        terminal::counted(sieve_host::device::num_threads() as u64, "thread"),
    ));
    let width = run.labels.iter().map(String::len).fold(15, usize::max);
    for &length in &args.lengths {
        let of_length = rows.iter().filter(|row| row.measure.num_tokens == length);
        print_selectors(length, width, &of_length.collect::<Vec<_>>(), run.loaded.shape.num_layers);
        let of_length = trained.iter().filter(|t| t.measure.num_tokens == length);
        let dense = rows.iter().find(|row| row.measure.num_tokens == length);
        let dense_loss = dense.map(|row| row.measure.dense_loss);
        print_trained(&of_length.collect::<Vec<_>>(), dense_loss);
    }
    for error in left_out {
        terminal::line(&format!("left out: {}", terminal::first_line(error)));
    }
}

/// What `--agreement` prints of a selector.
pub(super) fn agreement_line(of: &BlockAgreement) -> String {
    let BlockAgreement { selector, num_tokens, heads, pairs, .. } = of;
    let correlation = |x: Option<f64>| x.map_or("none".to_owned(), |x| format!("{x:.3}"));
    format!(
        "{selector}\n  {pairs} pairs of blocks of {heads} heads, {num_tokens} tokens; correlation of the bound U with \
         the error of the means {} (at most {:.2} of U), of a block's share with its share of attention {}",
        correlation(of.bound),
        of.largest_of_bound,
        correlation(of.mass),
    )
}

fn percent(x: Option<f64>) -> String {
    x.map_or("-".to_owned(), |x| format!("{:.2}%", 100.0 * x))
}

/// Prints the table of one length, with names `width` letters wide, and on which device each selector ran.
fn print_selectors(length: usize, width: usize, rows: &[&Row], num_layers: usize) {
    let Some(Row { measure: first, .. }) = rows.first() else {
        return;
    };
    terminal::line(&format!(
        "\n{length} tokens: dense loss {:.4}, dense attention {:.2} ms, dense prefill {:.2} ms\n\
         {:width$} {:>8} {:>8} {:>8} {:>9} {:>10} {:>12} {:>8} {:>11} {:>9} {:>8} {:>7} {:>7}",
        first.dense_loss,
        first.dense_attention_ms,
        first.dense_prefill_ms,
        "selector",
        "density",
        "tiles",
        "recall",
        "error",
        "select ms",
        "attention ms",
        "x dense",
        "prefill ms",
        "loss +",
        "KL",
        "top-1",
        "cosine"
    ));
    for Row { label, measure: m } in rows {
        terminal::line(&format!(
            "{label:width$} {:>8} {:>8} {:>8} {:>9.4} {:>10.2} {:>12.2} {:>8.2} {:>11.2} {:>8.4}{} {:>8.4} {:>7} \
             {:>7.4}",
            percent(Some(m.density)),
            percent(m.tile_density),
            percent(m.recall),
            m.output_error,
            m.select_ms,
            m.attention_ms,
            m.dense_attention_ms / m.attention_ms,
            m.prefill_ms,
            m.loss - m.dense_loss,
            if m.causal { " " } else { "*" },
            m.kl,
            percent(Some(m.top1)),
            m.cosine,
        ));
    }
    terminal::lines(notes(rows));
    print_devices(rows, num_layers);
}

/// Says on which device each selector chose and attended, and what it copied to the CPU. Selectors with the same path
/// share a line.
fn print_devices(rows: &[&Row], num_layers: usize) {
    let (on_cpu, others): (Vec<&&Row>, Vec<&&Row>) = rows.iter().partition(|row| is_on_cpu(&row.measure));
    let mut printed = Vec::new();
    for Row { label, measure } in others {
        let path = selector::paths(&measure.paths);
        if measure.host_bytes > 0.0 {
            terminal::line(&format!(
                "{label}: {path}; a prompt copies {:.2} MB of q, k, v or their means to the CPU",
                measure.host_bytes / 1e6
            ));
        } else if !printed.contains(&path) {
            terminal::line(&path);
            printed.push(path);
        }
    }
    if !on_cpu.is_empty() {
        let which = if on_cpu.len() == rows.len() { "all of these" } else { "the others" };
        let layers = match on_cpu[0].measure.paths.as_slice() {
            [all] if all.first == 0 && all.last + 1 == num_layers => "every layer".to_owned(),
            paths => selector::layers(paths.iter()),
        };
        terminal::line(&format!("{which} chose and attended on the CPU in {layers}"));
    }
}

/// Whether the model is on the CPU and all its dense layers took the same path.
fn is_on_cpu(measure: &SelectorMeasure) -> bool {
    let is_alike = measure.paths.windows(2).all(|pair| pair[0].path == pair[1].path);
    let first = measure.paths.first();
    is_alike && first.is_some_and(|of| of.path.ends_with("on the CPU")) && measure.host_bytes == 0.0
}

/// Lines below the table of one length: whether no method left anything out, and how much times varied.
fn notes(rows: &[&Row]) -> Vec<String> {
    let mut notes = Vec::new();
    if rows.iter().all(|row| row.measure.density >= 1.0) {
        notes.push(
            "no method left anything out at this length, so the rows do not describe them: give longer --lengths, or \
             settings that keep less"
                .to_owned(),
        );
    }
    let spread = |row: &&&Row| {
        let [least, most] = row.measure.attention_ms_range;
        (most - least) / row.measure.attention_ms
    };
    let widest = rows.iter().max_by(|a, b| spread(a).total_cmp(&spread(b)));
    if let Some(row) = widest
        && row.measure.num_windows > 1
    {
        let [least, most] = row.measure.attention_ms_range;
        notes.push(format!(
            "attention ms between prompts: {least:.2} to {most:.2} of {}, which differs most",
            row.label
        ));
    }
    notes
}

/// Prints the table of the models of `--compare`, with the loss that each adds to the dense model's.
fn print_trained(rows: &[&Trained], dense_loss: Option<f64>) {
    if rows.is_empty() {
        return;
    }
    terminal::line(&format!(
        "{:40} {:>8} {:>15} {:>11} {:>8} {:>9}",
        "trained with its own attention", "density", "distinct tokens", "prefill ms", "loss", "loss +"
    ));
    for row in rows {
        let m = &row.measure;
        terminal::line(&format!(
            "{:40} {:>8} {:>15} {:>11.2} {:>8.4} {:>9}   {}{}",
            m.attention,
            percent(Some(m.density)),
            percent(Some(m.distinct_density)),
            m.prefill_ms,
            m.loss,
            dense_loss.map_or("-".to_owned(), |dense| format!("{:.4}", m.loss - dense)),
            row.checkpoint,
            row.step.map_or(String::new(), |step| format!(" (step {step})")),
        ));
    }
}
