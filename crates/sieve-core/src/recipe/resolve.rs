//! Values that follow from others: the global batch, and what a stage leaves out.

use toml::{Table, Value};

use super::mistake::{Mistake, Problem};
use super::sections::default_rope_theta;

/// Turns a stage's `tokens` into steps, and fills `training.steps` in with their sum.
///
/// Works on unchecked values: what has a wrong type is left to be reported.
pub(super) fn steps_of_stages(table: &mut Table, mistakes: &mut Vec<Mistake>) {
    let training = table.get("training").and_then(Value::as_table);
    let of_training = |key: &str| training.and_then(|training| training.get(key)).cloned();
    let seq_len = of_training("seq_len");
    let rows = of_training("global_batch_size").or_else(|| of_training("local_batch_size"));
    let Some(stages) = table.get_mut("stage").and_then(Value::as_array_mut) else {
        return;
    };
    let mut sum = Some(0i64);
    for (number, stage) in (1..).zip(stages) {
        let Some(stage) = stage.as_table_mut() else {
            return;
        };
        if let Some(tokens) = stage.get("tokens").and_then(Value::as_integer) {
            let key = format!("stage.{number}.tokens");
            let own = |key: &str| stage.get(key).cloned();
            let seq_len = own("seq_len").or_else(|| seq_len.clone());
            let rows = own("global_batch_size").or_else(|| rows.clone());
            let size = |value: Option<Value>| value.and_then(|value| value.as_integer());
            let per_step = size(seq_len).and_then(|len| size(rows)?.checked_mul(len));
            if stage.contains_key("steps") {
                let problem = Problem::Rule {
                    what: "stands beside steps".to_owned(),
                    hint: "give one of the two".to_owned(),
                };
                mistakes.push(Mistake::new(key, problem));
                stage.remove("tokens");
            } else if let (Some(per_step @ 1..), 1..) = (per_step, tokens) {
                let steps = (tokens - 1) / per_step + 1;
                stage.insert("steps".to_owned(), Value::Integer(steps));
                stage.remove("tokens");
            } else {
                let problem = Problem::Rule {
                    what: format!("is {tokens}, which is no number of steps"),
                    hint: "give tokens, seq_len and the batch sizes at least 1".to_owned(),
                };
                mistakes.push(Mistake::new(key, problem));
                stage.remove("tokens");
                stage.insert("steps".to_owned(), Value::Integer(1));
            }
        }
        let steps = stage.get("steps").and_then(Value::as_integer);
        sum = sum
            .zip(steps)
            .and_then(|(sum, steps)| sum.checked_add(steps));
    }
    if let Some(sum) = sum
        && let Some(training) = table.get_mut("training").and_then(Value::as_table_mut)
        && !training.contains_key("steps")
    {
        training.insert("steps".to_owned(), Value::Integer(sum));
    }
}

/// Defaults that are another key's value.
pub(super) fn defaults(table: &mut Table) {
    let Some(training) = table.get_mut("training").and_then(Value::as_table_mut) else {
        return;
    };
    if let Some(local) = training.get("local_batch_size").cloned()
        && !training.contains_key("global_batch_size")
    {
        training.insert("global_batch_size".to_owned(), local);
    }
    let value = |section: &str, key: &str| table.get(section)?.get(key).cloned();
    let windows = ["sliding_window", "keep_window_size", "window_size"];
    let mut inherited = ["seq_len", "local_batch_size", "global_batch_size"]
        .map(|key| (key, value("training", key)))
        .to_vec();
    let rope_theta = value("model", "rope_theta").unwrap_or(Value::Float(default_rope_theta()));
    inherited.push(("rope_theta", Some(rope_theta)));
    let window = windows.iter().find_map(|key| value("attention", key));
    inherited.push(("window", window));
    let stages = table.get_mut("stage").and_then(Value::as_array_mut);
    for stage in stages.into_iter().flatten() {
        let Some(stage) = stage.as_table_mut() else {
            continue;
        };
        for (key, value) in &inherited {
            if let Some(value) = value
                && !stage.contains_key(*key)
            {
                stage.insert((*key).to_owned(), value.clone());
            }
        }
    }
}
