//! Language-model benchmarks, by the rules of lm-evaluation-harness.
mod answer;
mod chat;
mod likelihood;
mod longbench;
mod size;
mod spec;
mod template;
mod text_scores;

use crate::EvalError;
use answer::answers;
pub use chat::{TaskChat, Turn};
pub use likelihood::Likelihood;
use likelihood::{Encode, Pair, likelihoods};
pub use longbench::LongBenchAverage;
use serde::Serialize;
use sieve_data::{TableRow, Tokenizer};
use sieve_infer::{Selection, TaskModel, texts_together};
use sieve_ops::DeviceBackend;
pub use size::TaskSize;
use spec::{Measure, Question};
pub use spec::{READY_TASKS, Task};

/// The table of questions of a task.
#[derive(Clone, Debug)]
pub struct TaskRows {
    /// Rows of the table, one question each.
    pub rows: Vec<TableRow>,
    /// The solved examples are the first of these rows. `None`: the first of `rows`, without the row that is asked.
    pub examples: Option<Vec<TableRow>>,
}

/// Settings of a task's evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskRun {
    /// Number of solved examples before each question.
    pub fewshot: usize,
    /// Number of rows to ask; `None` asks all.
    pub limit: Option<usize>,
    /// Truncate prompts longer than the model's context at the beginning, or in the middle where the task says so,
    /// instead of failing.
    pub truncate: bool,
}

/// A score of a task: a mean over rows, or a function of such a mean (perplexity).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Score {
    /// Name of the score, as in lm-evaluation-harness.
    pub name: &'static str,
    /// Value of the score.
    pub value: f64,
    /// Standard error of the score, if it is a mean.
    pub stderr: Option<f64>,
}

/// The model's answer to one row of the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RowScore {
    /// Number of the row, from 1.
    pub row: usize,
    /// Index of the right choice, from 0; `None` in tasks without choices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<usize>,
    /// Likelihood of each choice, or of the one continuation.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub likelihoods: Vec<Likelihood>,
    /// The answer that the model generated; `None` in tasks that measure likelihoods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
    /// Score of the generated text between 0 and 1, if the task's answers are not simply right or wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
    /// Whether the row counts as right in `acc` or `exact_match`.
    pub is_right: bool,
}

/// Scores of one task.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskReport {
    /// Name of the task.
    pub task: String,
    /// Number of rows that were asked.
    pub num_rows: usize,
    /// Number of solved examples before each question.
    pub fewshot: usize,
    /// Number of texts cut to fit into the context.
    pub num_truncated: usize,
    /// Whether texts are cut in the middle instead of at the beginning.
    #[serde(skip)]
    pub cuts_middle: bool,
    /// The task's scores.
    pub scores: Vec<Score>,
    /// The answer to each row.
    #[serde(skip)]
    pub rows: Vec<RowScore>,
}

/// A task's rows, tokenised for a model.
#[derive(Debug)]
pub struct TaskTexts<'a> {
    task: &'a Task,
    fewshot: usize,
    num_truncated: usize,
    questions: Vec<Question>,
    texts: Texts,
}

/// The tokens to ask, row by row: pairs to score, or prompts to continue.
#[derive(Debug)]
enum Texts {
    Pairs(Vec<Vec<Pair>>),
    Prompts(Vec<Vec<u32>>),
}

impl<'a> TaskTexts<'a> {
    /// Builds the prompts for a model's tokenizer and context, as chats if `chat` is given.
    ///
    /// # Errors
    /// Rows without the task's columns; too few rows for the examples; a text longer than the context; a chat that the
    /// template refuses.
    pub fn new(
        task: &'a Task,
        data: &TaskRows,
        run: TaskRun,
        chat: Option<&TaskChat<'_>>,
        tokenizer: &Tokenizer,
        context: usize,
    ) -> Result<Self, EvalError> {
        let num_rows = data.rows.len().min(run.limit.unwrap_or(usize::MAX));
        let questions = task.questions(&data.rows[..num_rows])?;
        // A chat template writes special tokens by name; `encode_chat` reads these names as tokens.
        let encode = if chat.is_some() { Tokenizer::encode_chat } else { Tokenizer::encode_with_bos };
        let mut encoder = Encoder { task, tokenizer, encode, context, truncate: run.truncate, num_truncated: 0 };
        let asked = questions.iter().zip(&data.rows).map(|(question, row)| {
            let shots = shots(task, data, run.fewshot, row)?;
            task.pairs(question, &shots, chat).map_err(|reason| EvalError::task(task.name(), reason))
        });
        let asked: Vec<Vec<(String, String)>> = asked.collect::<Result<_, EvalError>>()?;
        let asked = asked.iter().enumerate();
        let texts = match task.measure {
            Measure::Generation => {
                // A row of a generation task has one pair, whose first text is the prompt.
                let prompts = asked.map(|(n, pairs)| encoder.prompt(n, &pairs[0].0));
                Texts::Prompts(prompts.collect::<Result<_, _>>()?)
            }
            Measure::Choices | Measure::Continuation => {
                let pairs = asked.map(|(n, pairs)| encoder.pairs(n, pairs));
                Texts::Pairs(pairs.collect::<Result<_, _>>()?)
            }
        };
        Ok(Self { task, fewshot: run.fewshot, num_truncated: encoder.num_truncated, questions, texts })
    }

    /// Name of the task.
    pub fn name(&self) -> &str {
        self.task.name()
    }

    /// Number of texts that are scored or continued.
    pub fn num_texts(&self) -> usize {
        match &self.texts {
            Texts::Pairs(pairs) => pairs.iter().map(Vec::len).sum(),
            Texts::Prompts(prompts) => prompts.len(),
        }
    }

    /// Sizes of asking this task. A selector reads each prompt on its own instead of several in a forward pass.
    pub fn size(&self, with_selector: bool) -> TaskSize {
        match &self.texts {
            Texts::Pairs(pairs) => likelihood::size(pairs, with_selector),
            Texts::Prompts(prompts) => {
                let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
                let cached = longest + self.task.matching.max_new_tokens;
                let together = texts_together(cached).min(prompts.len());
                TaskSize {
                    longest,
                    pass: longest,
                    cached,
                    // In a batch, a prompt is read into one more cache, and then moved into its row.
                    num_caches: together + usize::from(together > 1),
                }
            }
        }
    }
}

/// Asks a model the rows of a task; `observe` is called with the number of texts done and the number of all texts.
///
/// # Errors
/// A token outside the vocabulary, a NaN or infinite output, a selector that refuses a call.
pub fn run_task<B: DeviceBackend>(
    model: &TaskModel<'_, B>,
    texts: &TaskTexts<'_>,
    selection: Option<&mut Selection>,
    observe: &mut dyn FnMut(usize, usize),
) -> Result<TaskReport, EvalError> {
    let TaskTexts { task, questions, .. } = texts;
    let rows = match &texts.texts {
        Texts::Prompts(prompts) => generated(model, task, questions, prompts, selection, observe)?,
        Texts::Pairs(per_row) => {
            let num_pairs = per_row.iter().map(Vec::len).sum();
            let with_greedy = task.measure == Measure::Continuation;
            let observe = &mut |done: usize| observe(done, num_pairs);
            let found = likelihoods(model, per_row, with_greedy, selection, observe)?;
            let mut found = found.into_iter();
            let rows = questions.iter().zip(per_row).enumerate();
            let rows = rows.map(|(n, (question, pairs))| {
                let likelihoods: Vec<Likelihood> = found.by_ref().take(pairs.len()).collect();
                RowScore {
                    row: n + 1,
                    label: question.label,
                    is_right: match question.label {
                        // `acc` does not divide by the choice's length.
                        Some(label) => best(&likelihoods, |_| 1.0) == label,
                        None => likelihoods[0].is_greedy == Some(true),
                    },
                    likelihoods,
                    answer: None,
                    score: None,
                }
            });
            rows.collect()
        }
    };
    Ok(TaskReport {
        task: task.name().to_owned(),
        num_rows: rows.len(),
        fewshot: texts.fewshot,
        num_truncated: texts.num_truncated,
        cuts_middle: task.cut_middle,
        scores: scores(task, questions, &rows),
        rows,
    })
}

/// The solved examples before a row's question, prompt and answer; see [`TaskRows::examples`].
fn shots(task: &Task, data: &TaskRows, fewshot: usize, row: &TableRow) -> Result<Vec<(String, String)>, EvalError> {
    let examples = data.examples.as_ref().unwrap_or(&data.rows).iter();
    let others = examples.filter(|example| data.examples.is_some() || *example != row);
    let shots = others.take(fewshot).map(|example| task.shot(example)).collect::<Result<Vec<_>, _>>()?;
    let taken = shots.len();
    if taken < fewshot {
        let reason = format!(
            "{fewshot} examples are asked for, and {taken} rows can be examples\n  \
             hint: use --fewshot {taken} or less, or name more with --fewshot-data"
        );
        return Err(EvalError::task(task.name(), reason));
    }
    Ok(shots)
}

/// Tokenises a task's texts, and cuts or refuses the ones that are too long.
struct Encoder<'a> {
    task: &'a Task,
    tokenizer: &'a Tokenizer,
    encode: Encode,
    context: usize,
    truncate: bool,
    num_truncated: usize,
}

impl Encoder<'_> {
    /// Tokens of the (context, continuation) pairs of row `n`, cut at the beginning to fit into the model's context.
    fn pairs(&mut self, n: usize, pairs: &[(String, String)]) -> Result<Vec<Pair>, EvalError> {
        let prefix_id = self.tokenizer.prefix_id()?;
        let mut encoded = Vec::with_capacity(pairs.len());
        for (context, continuation) in pairs {
            let pair = Pair::encode(self.tokenizer, self.encode, prefix_id, [context, continuation])?;
            let Some(mut pair) = pair else {
                return Err(self.error(n, "has an ending without a token of its own".to_owned()));
            };
            self.check_length(n, pair.num_inputs(), self.context)?;
            pair.cut(self.context);
            encoded.push(pair);
        }
        Ok(encoded)
    }

    /// Tokens of the prompt of row `n`, cut so that the generated tokens fit into the model's context too.
    fn prompt(&mut self, n: usize, prompt: &str) -> Result<Vec<u32>, EvalError> {
        let mut tokens = (self.encode)(self.tokenizer, prompt)?;
        let room = self.context.saturating_sub(self.task.matching.max_new_tokens);
        if room == 0 {
            return Err(self.error(
                n,
                format!(
                    "leaves no room: max_new_tokens is {}, but the model's context is {}",
                    self.task.matching.max_new_tokens, self.context
                ),
            ));
        }
        self.check_length(n, tokens.len(), room)?;
        if let Some(surplus @ 1..) = tokens.len().checked_sub(room) {
            let first = if self.task.cut_middle { room / 2 } else { 0 };
            tokens.drain(first..first + surplus);
        }
        Ok(tokens)
    }

    /// Counts a text of row `n` that has to be cut; without `truncate`, refuses it.
    fn check_length(&mut self, n: usize, len: usize, room: usize) -> Result<(), EvalError> {
        if len <= room {
            return Ok(());
        }
        if !self.truncate {
            let cut = if self.task.cut_middle {
                "its middle (LongBench does so)"
            } else {
                "its beginning (lm-evaluation-harness does so)"
            };
            return Err(self.error(
                n,
                format!(
                    "has a sequence of {len} tokens, and the model's context has room for {room}\n  \
                     hint: use --truncate to leave out {cut}, or fewer --fewshot"
                ),
            ));
        }
        self.num_truncated += 1;
        Ok(())
    }

    fn error(&self, n: usize, what: String) -> EvalError {
        EvalError::task(self.task.name(), format!("row {} {what}", n + 1))
    }
}

/// The answers to the rows of a generation task, with their scores.
fn generated<B: DeviceBackend>(
    model: &TaskModel<'_, B>,
    task: &Task,
    questions: &[Question],
    prompts: &[Vec<u32>],
    selection: Option<&mut Selection>,
    observe: &mut dyn FnMut(usize, usize),
) -> Result<Vec<RowScore>, EvalError> {
    let observe = &mut |done: usize| observe(done, prompts.len());
    let texts = answers(model, prompts, &task.matching, selection, observe)?;
    let rows = texts.into_iter().zip(questions).enumerate();
    let row = |(n, (text, question)): (usize, (String, &Question))| RowScore {
        row: n + 1,
        label: None,
        likelihoods: Vec::new(),
        is_right: task.matching.is_right(&text, &question.endings),
        score: task.matching.score(&text, &question.endings, &question.classes),
        answer: Some(text),
    };
    Ok(rows.map(row).collect())
}

/// The choice with the largest log-likelihood divided by its length; of equal choices the first.
fn best(likelihoods: &[Likelihood], length: impl Fn(usize) -> f64) -> usize {
    let score = |n: usize| likelihoods[n].log_likelihood / length(n);
    (1..likelihoods.len()).fold(0, |best, n| if score(n) > score(best) { n } else { best })
}

/// The mean of `values` with its standard error.
fn mean_of(name: &'static str, values: Vec<f64>) -> Score {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    Score { name, value: mean, stderr: (values.len() > 1).then(|| (squares / (count - 1.0) / count).sqrt()) }
}

/// The scores that the task's measure has. `acc_norm` divides log-likelihoods by the choice's characters, `acc_bytes`
/// by its bytes.
fn scores(task: &Task, questions: &[Question], rows: &[RowScore]) -> Vec<Score> {
    let count = |is_right: &dyn Fn(&Question, &RowScore) -> bool| {
        let both = questions.iter().zip(rows);
        both.filter(|(question, row)| is_right(question, row)).count()
    };
    let mean = |name, right: usize| {
        let (p, n) = (right as f64 / rows.len() as f64, rows.len() as f64);
        Score { name, value: p, stderr: (rows.len() > 1).then(|| (p * (1.0 - p) / (n - 1.0)).sqrt()) }
    };
    let right = count(&|_, row| row.is_right);
    match task.measure {
        Measure::Generation => match rows.iter().map(|row| row.score).collect() {
            Some(values) => vec![mean_of(task.matching.score.name(), values)],
            None => vec![mean("exact_match", right)],
        },
        Measure::Continuation => {
            let nats: f64 = rows.iter().map(|row| -row.likelihoods[0].log_likelihood).sum();
            let perplexity = Score { name: "perplexity", value: (nats / rows.len() as f64).exp(), stderr: None };
            vec![perplexity, mean("acc", right)]
        }
        // With a prompt per choice all endings are the same text, so dividing by its length would change nothing.
        Measure::Choices if task.has_prompt_per_choice() => vec![mean("acc", right)],
        Measure::Choices => {
            let by = |length: fn(&str) -> usize| {
                count(&|question: &Question, row: &RowScore| {
                    let length = |n: usize| length(&question.endings[n]) as f64;
                    Some(best(&row.likelihoods, length)) == row.label
                })
            };
            vec![mean("acc", right), mean("acc_norm", by(|text| text.chars().count())), mean("acc_bytes", by(str::len))]
        }
    }
}

#[cfg(test)]
mod tests;
