//! The measures as lines, or as one JSON object.
use super::SelectorsArgs;
use super::compare::Trained;
use crate::terminal;
use anyhow::Result;
use sieve_eval::SelectorMeasure;
use sieve_hf::LoadedModel;
use sieve_ops::SieveBackend;

/// Prints all lengths.
pub(super) fn print<B: SieveBackend>(
    args: &SelectorsArgs,
    loaded: &LoadedModel<B>,
    measures: &[SelectorMeasure],
    trained: &[Trained],
    left_out: &[anyhow::Error],
) -> Result<()> {
    if args.json {
        let json = serde_json::json!({
            "checkpoint": loaded.path.display().to_string(),
            "step": loaded.state.step,
            "data": args.data,
            "threads": crate::device::num_threads(),
            "selectors": measures,
            "trained": trained,
            "left_out": left_out.iter().map(first_line).collect::<Vec<_>>(),
        });
        terminal::line(&json.to_string());
        return Ok(());
    }
    let chunks = match args.chunk {
        Some(chunk) => format!(", read in chunks of {chunk} tokens"),
        None => String::new(),
    };
    terminal::line(&format!(
        "{} (step {}), {} prompts of each length{chunks}, {} threads\n\
         density: computed pairs over causal pairs, probes included; error: of the layers' output; select and attention ms:\n\
         all layers of one prompt, on the CPU; prefill ms: the whole model without its head, the fastest prompt; loss: nats\n\
         per token, * where it is no likelihood (prefill loss)",
        loaded.path.display(),
        loaded.state.step,
        args.windows,
        crate::device::num_threads(),
    ));
    for &length in &args.lengths {
        let of_length = measures.iter().filter(|m| m.num_tokens == length);
        print_selectors(length, &of_length.collect::<Vec<_>>());
        let of_length = trained.iter().filter(|t| t.measure.num_tokens == length);
        let dense_loss = measures
            .iter()
            .find(|m| m.num_tokens == length)
            .map(|m| m.dense_loss);
        print_trained(&of_length.collect::<Vec<_>>(), dense_loss);
    }
    for error in left_out {
        terminal::line(&format!("left out: {}", first_line(error)));
    }
    Ok(())
}

/// An error without its hint.
fn first_line(error: &anyhow::Error) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().to_owned()
}

fn percent(x: Option<f64>) -> String {
    x.map_or("-".to_owned(), |x| format!("{:.2}%", 100.0 * x))
}

fn print_selectors(length: usize, rows: &[&SelectorMeasure]) {
    let Some(first) = rows.first() else {
        return;
    };
    terminal::line(&format!(
        "\n{length} tokens: dense loss {:.4}, dense attention {:.2} ms, dense prefill {:.2} ms\n\
         {:15} {:>8} {:>8} {:>8} {:>9} {:>10} {:>12} {:>8} {:>11} {:>9}",
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
        "loss +"
    ));
    for m in rows {
        terminal::line(&format!(
            "{:15} {:>8} {:>8} {:>8} {:>9.4} {:>10.2} {:>12.2} {:>8.2} {:>11.2} {:>8.4}{}",
            m.name,
            percent(Some(m.density)),
            percent(m.tile_density),
            percent(m.recall),
            m.output_error,
            m.select_ms,
            m.attention_ms,
            m.dense_attention_ms / m.attention_ms,
            m.prefill_ms,
            m.loss - m.dense_loss,
            if m.causal { " " } else { "*" }
        ));
    }
}

fn print_trained(rows: &[&Trained], dense_loss: Option<f64>) {
    if rows.is_empty() {
        return;
    }
    terminal::line(&format!(
        "{:40} {:>8} {:>15} {:>11} {:>8} {:>9}",
        "trained with its own attention",
        "density",
        "distinct tokens",
        "prefill ms",
        "loss",
        "loss +"
    ));
    for row in rows {
        let m = &row.measure;
        terminal::line(&format!(
            "{:40} {:>8} {:>15} {:>11.2} {:>8.4} {:>9}   {} (step {})",
            m.attention,
            percent(Some(m.density)),
            percent(Some(m.distinct_density)),
            m.prefill_ms,
            m.loss,
            dense_loss.map_or("-".to_owned(), |dense| format!("{:.4}", m.loss - dense)),
            row.checkpoint,
            row.step,
        ));
    }
}
