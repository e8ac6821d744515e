//! The tasks of language-model papers, by the rules of lm-evaluation-harness.
mod answer;
mod likelihood;
mod spec;
mod template;

use crate::{EvalError, Selection};
use answer::answer;
pub use likelihood::Likelihood;
use likelihood::{Pair, likelihoods};
use serde::Serialize;
use sieve_data::{TableRow, Tokenizer};
use sieve_nn::Qwen3;
use sieve_ops::SieveBackend;
use spec::{Measure, Question};
pub use spec::{READY_TASKS, Task};

/// Who is asked.
#[derive(Debug)]
pub struct TaskModel<'a, B: SieveBackend> {
    /// The model.
    pub model: &'a Qwen3<B>,
    /// Its tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Where it computes.
    pub device: &'a B::Device,
}

/// What a task is asked with.
#[derive(Clone, Debug)]
pub struct TaskRows {
    /// The rows asked.
    pub rows: Vec<TableRow>,
    /// Rows that examples are taken from: the first ones. Where absent, the first of `rows` other than the row asked.
    pub examples: Option<Vec<TableRow>>,
}

/// How a task is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskRun {
    /// Solved examples before each question.
    pub fewshot: usize,
    /// The first rows alone.
    pub limit: Option<usize>,
    /// Leave out the beginning of what is longer than the model's context, in place of an error.
    pub truncate: bool,
}

/// A mean over rows, or what is made of one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Score {
    /// Its name in lm-evaluation-harness.
    pub name: &'static str,
    /// The value.
    pub value: f64,
    /// Standard error of a mean.
    pub stderr: Option<f64>,
}

/// What one row gave.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RowScore {
    /// The row, from 1.
    pub row: usize,
    /// The right choice, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<usize>,
    /// Of each choice, or of the one continuation.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub likelihoods: Vec<Likelihood>,
    /// What was generated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
    /// Whether it counts for `acc`, or for `exact_match`.
    pub is_right: bool,
}

/// A task's scores.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskReport {
    /// The task.
    pub task: String,
    /// Rows asked.
    pub num_rows: usize,
    /// Examples before each question.
    pub fewshot: usize,
    /// Texts that were cut at their beginning.
    pub num_truncated: usize,
    /// The scores.
    pub scores: Vec<Score>,
    /// Row by row.
    #[serde(skip)]
    pub rows: Vec<RowScore>,
}

/// Asks a model the rows of a task; `observe` hears how many of how many texts are done.
///
/// # Errors
/// Rows that the task does not fit, too few examples, a text longer than the model's context, an output that is no
/// number, a
/// selector that refuses a call.
pub fn run_task<B: SieveBackend>(
    model: &TaskModel<'_, B>,
    task: &Task,
    data: &TaskRows,
    run: TaskRun,
    selection: Option<&mut Selection>,
    observe: &mut dyn FnMut(usize, usize),
) -> Result<TaskReport, EvalError> {
    let num_rows = data.rows.len().min(run.limit.unwrap_or(usize::MAX));
    let questions = task.questions(&data.rows[..num_rows])?;
    let mut asked = Vec::with_capacity(num_rows);
    for (question, row) in questions.iter().zip(&data.rows) {
        asked.push(task.pairs(question, &shots(task, data, run.fewshot, row)?));
    }
    let mut texts = Texts {
        task,
        tokenizer: model.tokenizer,
        context: model.model.shape().max_seq_len,
        truncate: run.truncate,
        num_truncated: 0,
    };
    let rows = match task.measure {
        Measure::Generation => {
            let prompts = asked.iter().enumerate();
            let prompts = prompts.map(|(n, pairs)| texts.prompt(n, &pairs[0].0));
            let prompts: Vec<Vec<u32>> = prompts.collect::<Result<_, _>>()?;
            generated(model, task, &questions, &prompts, selection, observe)?
        }
        Measure::Choices | Measure::Continuation => {
            let pairs = asked.iter().enumerate();
            let pairs = pairs.map(|(n, pairs)| texts.pairs(n, pairs));
            let per_row: Vec<Vec<Pair>> = pairs.collect::<Result<_, _>>()?;
            let flat: Vec<Pair> = per_row.concat();
            let with_greedy = task.measure == Measure::Continuation;
            let observe = &mut |done: usize| observe(done, flat.len());
            let found = likelihoods(model, &flat, with_greedy, selection, observe)?;
            let mut found = found.into_iter();
            let rows = questions.iter().zip(&per_row).enumerate();
            let rows = rows.map(|(n, (question, pairs))| {
                let likelihoods: Vec<Likelihood> = found.by_ref().take(pairs.len()).collect();
                RowScore {
                    row: n + 1,
                    label: question.label,
                    is_right: match question.label {
                        Some(label) => best(&likelihoods, |_| 1.0) == label,
                        None => likelihoods[0].is_greedy == Some(true),
                    },
                    likelihoods,
                    answer: None,
                }
            });
            rows.collect()
        }
    };
    Ok(TaskReport {
        task: task.name().to_owned(),
        num_rows,
        fewshot: run.fewshot,
        num_truncated: texts.num_truncated,
        scores: scores(task, &questions, &rows),
        rows,
    })
}

/// The solved examples before a row's question: the first of the examples, or of the task's own rows but for this one.
fn shots(
    task: &Task,
    data: &TaskRows,
    fewshot: usize,
    row: &TableRow,
) -> Result<String, EvalError> {
    let examples = data.examples.as_ref().unwrap_or(&data.rows).iter();
    let others = examples.filter(|example| data.examples.is_some() || *example != row);
    let (mut text, mut left) = (String::new(), 0);
    for example in others.take(fewshot) {
        text += &task.shot(example)?;
        left += 1;
    }
    match left == fewshot {
        true => Ok(text),
        false => Err(EvalError::Task {
            task: task.name().to_owned(),
            reason: format!(
                "{fewshot} examples are asked for, and {left} rows are there to take them from\n  hint: use --fewshot {left} or less, or name more with --fewshot-data"
            ),
        }),
    }
}

/// Texts on their way to tokens.
struct Texts<'a> {
    task: &'a Task,
    tokenizer: &'a Tokenizer,
    context: usize,
    truncate: bool,
    num_truncated: usize,
}

impl Texts<'_> {
    fn pairs(&mut self, n: usize, pairs: &[(String, String)]) -> Result<Vec<Pair>, EvalError> {
        let eos_id = self.tokenizer.eos_id()?;
        let mut encoded = Vec::with_capacity(pairs.len());
        for (context, continuation) in pairs {
            let pair = Pair::encode(self.tokenizer, eos_id, context, continuation)?;
            let Some(mut pair) = pair else {
                return Err(self.error(n, "has an ending without a token of its own".to_owned()));
            };
            self.check_length(n, pair.num_inputs(), self.context)?;
            pair.cut(self.context);
            encoded.push(pair);
        }
        Ok(encoded)
    }

    fn prompt(&mut self, n: usize, prompt: &str) -> Result<Vec<u32>, EvalError> {
        let mut tokens = self.tokenizer.encode(prompt)?;
        let room = self
            .context
            .saturating_sub(self.task.matching.max_new_tokens);
        if room == 0 {
            return Err(self.error(
                n,
                format!(
                    "leaves no room: max_new_tokens is {}, and the model's context is {}",
                    self.task.matching.max_new_tokens, self.context
                ),
            ));
        }
        self.check_length(n, tokens.len(), room)?;
        tokens.drain(..tokens.len().saturating_sub(room));
        Ok(tokens)
    }

    fn check_length(&mut self, n: usize, len: usize, room: usize) -> Result<(), EvalError> {
        if len <= room {
            return Ok(());
        }
        if !self.truncate {
            return Err(self.error(n, format!(
                "has a text of {len} tokens, and the model's context has room for {room}\n  hint: use --truncate to leave out its beginning (lm-evaluation-harness does so), or fewer --fewshot"
            )));
        }
        self.num_truncated += 1;
        Ok(())
    }

    fn error(&self, n: usize, what: String) -> EvalError {
        EvalError::Task {
            task: self.task.name().to_owned(),
            reason: format!("row {} {what}", n + 1),
        }
    }
}

fn generated<B: SieveBackend>(
    model: &TaskModel<'_, B>,
    task: &Task,
    questions: &[Question],
    prompts: &[Vec<u32>],
    mut selection: Option<&mut Selection>,
    observe: &mut dyn FnMut(usize, usize),
) -> Result<Vec<RowScore>, EvalError> {
    let mut rows = Vec::with_capacity(questions.len());
    for (n, (question, prompt)) in questions.iter().zip(prompts).enumerate() {
        let selection = selection.as_deref_mut();
        let text = answer(model, prompt, &task.matching, selection)?;
        rows.push(RowScore {
            row: n + 1,
            label: None,
            likelihoods: Vec::new(),
            is_right: task.matching.is_right(&text, &question.endings),
            answer: Some(text),
        });
        observe(n + 1, questions.len());
    }
    Ok(rows)
}

/// The choice with the largest log-likelihood over its length; the first of equal ones.
fn best(likelihoods: &[Likelihood], length: impl Fn(usize) -> f64) -> usize {
    let score = |n: usize| likelihoods[n].log_likelihood / length(n);
    (1..likelihoods.len()).fold(0, |best, n| if score(n) > score(best) { n } else { best })
}

fn scores(task: &Task, questions: &[Question], rows: &[RowScore]) -> Vec<Score> {
    let count = |is_right: &dyn Fn(&Question, &RowScore) -> bool| {
        let both = questions.iter().zip(rows);
        both.filter(|(question, row)| is_right(question, row))
            .count()
    };
    let mean = |name, right: usize| {
        let (p, n) = (right as f64 / rows.len() as f64, rows.len() as f64);
        Score {
            name,
            value: p,
            stderr: (rows.len() > 1).then(|| (p * (1.0 - p) / (n - 1.0)).sqrt()),
        }
    };
    let right = count(&|_, row| row.is_right);
    match task.measure {
        Measure::Generation => vec![mean("exact_match", right)],
        Measure::Continuation => {
            let nats: f64 = rows
                .iter()
                .map(|row| -row.likelihoods[0].log_likelihood)
                .sum();
            let perplexity = Score {
                name: "perplexity",
                value: (nats / rows.len() as f64).exp(),
                stderr: None,
            };
            vec![perplexity, mean("acc", right)]
        }
        // The choices' lengths are no part of endings that are all the same.
        Measure::Choices if task.has_prompt_per_choice() => vec![mean("acc", right)],
        Measure::Choices => {
            let by = |length: fn(&str) -> usize| {
                count(&|question: &Question, row: &RowScore| {
                    let length = |n: usize| length(&question.endings[n]) as f64;
                    Some(best(&row.likelihoods, length)) == row.label
                })
            };
            vec![
                mean("acc", right),
                mean("acc_norm", by(|text| text.chars().count())),
                mean("acc_bytes", by(str::len)),
            ]
        }
    }
}

#[cfg(test)]
mod tests;
