//! A task: a small TOML file that says how a row of a data set becomes a question.
use super::chat::TaskChat;
use super::template::{Filter, Template, texts};
use super::text_scores::TextScore;
use crate::EvalError;
use serde::{Deserialize, Serialize};
use sieve_data::TableRow;

/// (name, text) of TOML files in the folder `tasks`.
macro_rules! tasks {
    ($($name:literal)*) => { [$(($name, include_str!(concat!("../../tasks/", $name, ".toml"))),)*] };
}

/// The tasks that come with the program: (name, TOML). The names are lm-evaluation-harness's.
pub const READY_TASKS: [(&str, &str); 29] = tasks! {
    "lambada_openai"
    "hellaswag"
    "piqa"
    "arc_easy"
    "arc_challenge"
    "winogrande"
    "boolq"
    "openbookqa"
    "sciq"
    "mmlu"
    "triviaqa"
    "gsm8k"
    "longbench_narrativeqa"
    "longbench_qasper"
    "longbench_multifieldqa_en"
    "longbench_hotpotqa"
    "longbench_2wikimqa"
    "longbench_musique"
    "longbench_gov_report"
    "longbench_qmsum"
    "longbench_multi_news"
    "longbench_trec"
    "longbench_triviaqa"
    "longbench_samsum"
    "longbench_passage_count"
    "longbench_passage_retrieval_en"
    "longbench_lcc"
    "longbench_repobench-p"
    "longbench2"
};

/// How a task scores a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Measure {
    /// Which of several endings the model gives the largest likelihood.
    Choices,
    /// The likelihood of one ending, and whether greedy decoding would generate it.
    Continuation,
    /// Whether a greedily generated text is the answer.
    Generation,
}

/// Texts of a row: a column that holds a list, or one template for each text.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Texts<T> {
    Column(String),
    Templates(Vec<T>),
}

/// The keys of a task's TOML file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    about: Option<String>,
    measure: Measure,
    #[serde(default)]
    description: String,
    prompt: Option<String>,
    #[serde(default)]
    prompts: Vec<String>,
    choices: Option<Texts<String>>,
    labels: Option<Texts<String>>,
    label: Option<String>,
    target: Option<String>,
    answers: Option<Texts<String>>,
    #[serde(default)]
    filters: Vec<String>,
    #[serde(default)]
    fewshot: usize,
    delimiter: Option<String>,
    #[serde(default)]
    stop: Vec<String>,
    max_new_tokens: Option<usize>,
    number_after: Option<String>,
    #[serde(default)]
    ignore_case: bool,
    #[serde(default)]
    ignore_punctuation: bool,
    #[serde(default)]
    score: TextScore,
    classes: Option<String>,
    #[serde(default)]
    first_line: bool,
    #[serde(default)]
    cut_middle: bool,
}

impl Texts<String> {
    fn compile(&self) -> Result<Texts<Template>, String> {
        Ok(match self {
            Self::Column(column) => Texts::Column(column.clone()),
            Self::Templates(texts) => Texts::Templates(templates(texts)?),
        })
    }
}

impl File {
    /// The choices, the continuation or the right answers. Fails if the keys do not fit the measure.
    fn endings(&self) -> Result<Texts<Template>, String> {
        let target = self.target.as_deref().map(Template::parse).transpose()?;
        let target = target.map(|target| Texts::Templates(vec![target]));
        let [choices, answers] = [&self.choices, &self.answers].map(|texts| texts.as_ref().map(Texts::compile));
        let (choices, answers) = (choices.transpose()?, answers.transpose()?);
        let has_label = self.label.is_some();
        let one_prompt = self.prompt.is_some() && self.prompts.is_empty();
        let many_prompts = self.prompt.is_none() && self.prompts.len() > 1;
        let (endings, needed) = match self.measure {
            Measure::Choices if many_prompts => (
                target.filter(|_| choices.is_none() && has_label),
                "prompts with two templates or more need target and label, and no choices",
            ),
            Measure::Choices => (
                choices.filter(|_| target.is_none() && one_prompt && has_label),
                "measure = \"choices\" needs prompt, choices and label; or prompts, target and label",
            ),
            Measure::Continuation => (
                target.filter(|_| one_prompt && !has_label),
                "measure = \"continuation\" needs prompt and target, and no label",
            ),
            Measure::Generation => (
                answers.filter(|_| one_prompt && !has_label),
                "measure = \"generation\" needs prompt and answers, and no label",
            ),
        };
        endings.ok_or_else(|| needed.to_owned())
    }
}

fn templates<'a>(texts: impl IntoIterator<Item = &'a String>) -> Result<Vec<Template>, String> {
    texts.into_iter().map(|text| Template::parse(text)).collect()
}

/// A benchmark: how a row becomes a question, and what is measured.
#[derive(Clone, Debug)]
pub struct Task {
    name: String,
    about: String,
    fewshot: usize,
    pub(super) measure: Measure,
    description: Template,
    prompts: Vec<Template>,
    endings: Texts<Template>,
    labels: Option<Texts<Template>>,
    label: Option<Template>,
    filters: Vec<Filter>,
    /// Text between a prompt and its answer.
    delimiter: String,
    /// Column with all classes, for a classification.
    classes: Option<String>,
    /// Whether a prompt that is too long is cut in its middle instead of at its beginning.
    pub(super) cut_middle: bool,
    pub(super) matching: Matching,
}

/// How a text is generated and compared with the answers.
#[derive(Clone, Debug)]
pub(super) struct Matching {
    /// Texts that end an answer.
    pub(super) stop: Vec<String>,
    pub(super) max_new_tokens: usize,
    /// Only the number after this text is compared; `None`: the whole text.
    pub(super) number_after: Option<String>,
    pub(super) ignore_case: bool,
    pub(super) ignore_punctuation: bool,
    pub(super) score: TextScore,
    /// Whether only the answer's first non-empty line counts.
    pub(super) first_line: bool,
}

/// A question to the model, made from a table row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Question {
    /// Text before the solved examples.
    pub(super) description: String,
    /// One prompt, or a prompt for each choice.
    pub(super) prompts: Vec<String>,
    /// The choices, or the one continuation, or the right answers of a generation. With a prompt for each choice there
    /// is one ending.
    pub(super) endings: Vec<String>,
    /// Index of the right choice, from 0.
    pub(super) label: Option<usize>,
    /// All classes, for a classification of generated text.
    pub(super) classes: Vec<String>,
}

impl Task {
    /// A task of [`READY_TASKS`].
    ///
    /// # Errors
    /// No task has this name; the message names the most similar one.
    pub fn ready(name: &str) -> Result<Self, EvalError> {
        let Some((_, text)) = READY_TASKS.iter().find(|(known, _)| *known == name) else {
            let known = READY_TASKS.map(|(name, _)| name);
            let more = "; one of your own is a TOML file, named by its path";
            return Err(EvalError::unknown_task(name, &known, more));
        };
        Self::parse(name, text)
    }

    /// A task from TOML.
    ///
    /// # Errors
    /// Invalid TOML, an unknown key, an invalid template, keys that contradict each other.
    pub fn parse(name: &str, text: &str) -> Result<Self, EvalError> {
        Self::compile(name, text).map_err(|reason| EvalError::task(name, reason))
    }

    /// As [`parse`](Self::parse), with the error's reason alone.
    fn compile(name: &str, text: &str) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())?;
        let template = |text: &Option<String>| text.as_deref().map(Template::parse).transpose();
        let prompts = templates(file.prompt.iter().chain(&file.prompts))?;
        let endings = file.endings()?;
        if file.score != TextScore::default() && file.measure != Measure::Generation {
            return Err("score belongs to measure = \"generation\"".to_owned());
        }
        if (file.score == TextScore::Classification) != file.classes.is_some() {
            return Err("score = \"classification\" and classes, a column, belong together".to_owned());
        }
        if file.stop.iter().any(String::is_empty) {
            return Err("stop has an empty string, at which every answer would end".to_owned());
        }
        if file.answers.is_some() && file.measure != Measure::Generation {
            return Err("answers belong to measure = \"generation\"".to_owned());
        }
        Ok(Self {
            name: name.to_owned(),
            about: file.about.unwrap_or_default(),
            fewshot: file.fewshot,
            measure: file.measure,
            description: Template::parse(&file.description)?,
            prompts,
            endings,
            labels: file.labels.as_ref().map(Texts::compile).transpose()?,
            label: template(&file.label)?,
            filters: file.filters.iter().map(|name| Filter::parse(name)).collect::<Result<_, _>>()?,
            delimiter: file.delimiter.unwrap_or_else(|| " ".to_owned()),
            classes: file.classes,
            cut_middle: file.cut_middle,
            matching: Matching {
                stop: file.stop,
                max_new_tokens: file.max_new_tokens.unwrap_or(256),
                number_after: file.number_after,
                ignore_case: file.ignore_case,
                ignore_punctuation: file.ignore_punctuation,
                score: file.score,
                first_line: file.first_line,
            },
        })
    }

    /// Name of the task.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A line about the question, the data set and its licence.
    pub fn about(&self) -> &str {
        &self.about
    }

    /// Default number of solved examples before a question.
    pub fn fewshot(&self) -> usize {
        self.fewshot
    }

    /// Whether each choice has its own prompt; all choices then have the same ending.
    pub(super) fn has_prompt_per_choice(&self) -> bool {
        self.prompts.len() > 1
    }

    /// The questions of a table; rows count from 1 in errors.
    pub(super) fn questions(&self, rows: &[TableRow]) -> Result<Vec<Question>, EvalError> {
        let questions = rows.iter().enumerate().map(|(n, row)| {
            self.question(row).map_err(|what| EvalError::task(&self.name, format!("row {} {what}", n + 1)))
        });
        questions.collect()
    }

    /// The question of a row. An error says what is wrong with the row.
    fn question(&self, row: &TableRow) -> Result<Question, String> {
        let filtered = |text: String| {
            let mut all = self.filters.iter();
            all.try_fold(text, |text, filter| filter.apply(&text))
        };
        let list = |source: &Texts<Template>| match source {
            Texts::Column(column) => texts(row, column),
            Texts::Templates(list) => list.iter().map(|text| text.render(row)).collect(),
        };
        let prompts: Vec<String> =
            (self.prompts.iter()).map(|prompt| prompt.render(row).and_then(filtered)).collect::<Result<_, _>>()?;
        let endings = list(&self.endings)?;
        let endings: Vec<String> = endings.into_iter().map(filtered).collect::<Result<_, _>>()?;
        // One prompt has several endings, or several prompts have one.
        let num_choices = prompts.len().max(endings.len());
        if self.measure == Measure::Choices && num_choices < 2 {
            return Err(format!("has {}, and two are the least", counted(num_choices, "choice")));
        }
        if endings.is_empty() {
            return Err("has no answer".to_owned());
        }
        let label = match &self.label {
            None => None,
            Some(label) => {
                let label = label.render(row)?;
                let labels = self.labels.as_ref().map(list).transpose()?;
                // Where the task's file lists the choices, a row may give the label as one of them, as "B".
                let names = match &self.endings {
                    Texts::Templates(_) => endings.as_slice(),
                    Texts::Column(_) => &[],
                };
                Some(position(label.trim(), labels.as_deref(), names, num_choices)?)
            }
        };
        Ok(Question {
            description: self.description.render(row)?,
            prompts,
            endings,
            label,
            classes: match &self.classes {
                None => Vec::new(),
                Some(column) => texts(row, column)?,
            },
        })
    }

    /// Prompt and answer of a row, for a solved example.
    pub(super) fn shot(&self, row: &TableRow) -> Result<(String, String), EvalError> {
        let question = self.question(row).map_err(|what| EvalError::task(&self.name, format!("an example {what}")))?;
        let right = question.label.unwrap_or(0);
        // A single prompt or ending serves all choices.
        let of = |list: &[String]| list[right.min(list.len() - 1)].clone();
        Ok((of(&question.prompts), of(&question.endings)))
    }

    /// The (context, continuation) pairs of a question: a pair for each choice, or a single pair without choices.
    /// `shots` are the solved examples, prompt and answer. In a chat, nothing is between a question and a choice.
    ///
    /// # Errors
    /// What the chat's template refuses.
    pub(super) fn pairs(
        &self,
        question: &Question,
        shots: &[(String, String)],
        chat: Option<&TaskChat<'_>>,
    ) -> Result<Vec<(String, String)>, String> {
        let shot = |(prompt, answer): &(String, String)| format!("{prompt}{}{answer}\n\n", self.delimiter);
        let context = |prompt: &String| match chat {
            Some(chat) => chat.text(&question.description, shots, prompt),
            None => Ok(format!("{}{}{prompt}", question.description, shots.iter().map(shot).collect::<String>())),
        };
        let contexts = question.prompts.iter().map(context).collect::<Result<Vec<String>, String>>()?;
        let delimiter = if chat.is_some() { "" } else { &self.delimiter };
        Ok(match self.measure {
            Measure::Choices => {
                let ending = |ending: &String| format!("{delimiter}{ending}");
                if self.has_prompt_per_choice() {
                    contexts.into_iter().map(|context| (context, ending(&question.endings[0]))).collect()
                } else {
                    question.endings.iter().map(|choice| (contexts[0].clone(), ending(choice))).collect()
                }
            }
            Measure::Continuation | Measure::Generation => {
                contexts.into_iter().take(1).map(|context| (context, question.endings[0].clone())).collect()
            }
        })
    }
}

/// A count with its noun: `1 choice`, `2 choices`.
fn counted(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// The index of the choice that a label names: its index in `labels`, or without `labels` a number from 0 or one of the
/// `names` of the choices.
fn position(label: &str, labels: Option<&[String]>, names: &[String], num_choices: usize) -> Result<usize, String> {
    match labels {
        Some(labels) if labels.len() != num_choices => {
            Err(format!("has {} and {}", counted(num_choices, "choice"), counted(labels.len(), "label")))
        }
        Some(labels) => labels
            .iter()
            .position(|known| known == label)
            .ok_or_else(|| format!("has the label {label:?}, which is none of {}", labels.join(", "))),
        None => (label.parse().ok())
            .filter(|&n| n < num_choices)
            .or_else(|| names.iter().position(|known| known == label))
            .ok_or_else(|| format!("has the label {label:?}, which is not a number below {num_choices}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_testing::refusal;

    fn rows(rows: &str) -> Vec<TableRow> {
        let rows = rows.lines().map(serde_json::from_str);
        rows.collect::<Result<_, _>>().expect("objects")
    }

    fn questions(task: &str, text: &str) -> Result<Vec<Question>, EvalError> {
        Task::ready(task).expect("ready").questions(&rows(text))
    }

    #[test]
    fn every_ready_task_can_be_read() {
        for (name, _) in READY_TASKS {
            let task = Task::ready(name).expect(name);
            assert!(task.about().contains(','), "{name}");
        }
        refusal(Task::ready("helaswag"), "did you mean hellaswag?");
    }

    #[test]
    fn rows_become_the_questions_of_the_papers() {
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        let row = concat!(
            r#"{"question": "Why?", "answerKey": "C", "#,
            r#""choices": {"text": ["a", "b", "c"], "label": ["A", "B", "C"]}}"#
        );
        let arc = questions("arc_easy", row).expect("a question");
        assert_eq!(arc[0].prompts, ["Question: Why?\nAnswer:"]);
        assert_eq!((arc[0].endings.len(), arc[0].label), (3, Some(2)));
        let task = Task::ready("arc_easy").expect("ready");
        let shot = task.shot(&rows(row)[0]).expect("an example");
        assert_eq!(shot, pair("Question: Why?\nAnswer:", "c"));
        let row = r#"{"sentence": "Ann met Eve, and _ smiled.", "option1": "Ann", "option2": "Eve", "answer": "2"}"#;
        let blank = questions("winogrande", row).expect("a question");
        let task = Task::ready("winogrande").expect("ready");
        assert_eq!(
            task.pairs(&blank[0], &[], None).expect("no chat"),
            [pair("Ann met Eve, and Ann", " smiled."), pair("Ann met Eve, and Eve", " smiled.")]
        );
        let shot = task.shot(&rows(row)[0]).expect("an example");
        assert_eq!(shot, pair("Ann met Eve, and Eve", "smiled."));
        // A row of LongBench v2's own file, and a row that has the choices in one column.
        let own = concat!(
            r#"{"_id": "6", "question": "Who? ", "choice_A": "Ann", "choice_B": "Eve", "choice_C": "Joe", "#,
            r#""choice_D": "Sue", "answer": "C", "context": "It was Joe."}"#
        );
        let other = concat!(
            r#"{"question": "Who? ", "choices": ["Ann", "Eve", "Joe", "Sue"], "answer": 2, "#,
            r#""context": "It was Joe."}"#
        );
        let [own, other] = [own, other].map(|row| questions("longbench2", row).expect("a question"));
        assert_eq!((own[0].label, &own), (Some(2), &other));
        assert!(own[0].prompts[0].ends_with(": Who?\nChoices:\n(A) Ann\n(B) Eve\n(C) Joe\n(D) Sue\n\nAnswer:"));
        let lambada = questions("lambada_openai", r#"{"text": "It was a cat"}"#).expect("one");
        let task = Task::ready("lambada_openai").expect("ready");
        let pairs = task.pairs(&lambada[0], &[pair("x", "y")], None).expect("no chat");
        assert_eq!(pairs, [pair("x y\n\nIt was a", " cat")]);
    }
}
