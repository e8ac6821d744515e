//! RULER's two question tasks: a question of SQuAD or HotpotQA, with the documents that answer it among others.
use super::random::Random;
use super::sample::{LongSample, Match, NUM_WRONG, depth};
use crate::EvalError;
use serde::Deserialize;
use std::collections::BTreeMap;

/// Questions and documents of a published file.
#[derive(Clone, Debug)]
pub struct QaData {
    documents: Vec<String>,
    questions: Vec<Question>,
}

#[derive(Clone, Debug)]
struct Question {
    query: String,
    answers: Vec<String>,
    /// Indices of documents that are always included. SQuAD: the one with the answer. HotpotQA: all of the question's
    /// documents; some hold the answer.
    gold: Vec<usize>,
    /// Indices of other documents of the same article, which are added first.
    near: Vec<usize>,
}

#[derive(Deserialize)]
struct Squad {
    data: Vec<Article>,
}

#[derive(Deserialize)]
struct Article {
    paragraphs: Vec<Paragraph>,
}

#[derive(Deserialize)]
struct Paragraph {
    context: String,
    qas: Vec<SquadQuestion>,
}

#[derive(Deserialize)]
struct SquadQuestion {
    question: String,
    #[serde(default)]
    is_impossible: bool,
    answers: Vec<SquadAnswer>,
}

#[derive(Deserialize)]
struct SquadAnswer {
    text: String,
}

#[derive(Deserialize)]
struct HotpotQuestion {
    question: String,
    answer: String,
    context: Vec<(String, Vec<String>)>,
}

impl QaData {
    /// Parses SQuAD's published JSON (an object with `data`) or HotpotQA's (a list of questions with `context`).
    ///
    /// # Errors
    /// Text that is neither, or that holds no question.
    pub fn parse(name: &str, text: &str) -> Result<Self, EvalError> {
        let refused = |reason: String| {
            let hint = "give SQuAD 2.0 (dev-v2.0.json) or HotpotQA (hotpot_dev_distractor_v1.json) as published";
            EvalError::refused(format!("{name}: {reason}"), hint)
        };
        let is_list = text.trim_start().starts_with('[');
        let data = if is_list {
            serde_json::from_str(text).map(Self::of_hotpot)
        } else {
            serde_json::from_str(text).map(Self::of_squad)
        };
        let data = data.map_err(|error| refused(error.to_string()))?;
        if data.questions.is_empty() {
            Err(refused("it holds no question with an answer".to_owned()))
        } else {
            Ok(data)
        }
    }

    /// Number of distinct documents of the data set.
    pub(super) fn num_documents(&self) -> usize {
        self.documents.len()
    }

    /// Each paragraph is a document; questions without an answer are left out.
    fn of_squad(squad: Squad) -> Self {
        let contexts = squad.data.iter().flat_map(|article| &article.paragraphs);
        let (documents, numbers) = numbered(contexts.map(|paragraph| paragraph.context.clone()));
        let mut questions = Vec::new();
        for article in &squad.data {
            let of_article = article.paragraphs.iter().map(|one| numbers[&one.context]);
            let of_article: Vec<usize> = of_article.collect();
            for paragraph in &article.paragraphs {
                let gold = numbers[&paragraph.context];
                for question in &paragraph.qas {
                    if question.is_impossible || question.answers.is_empty() {
                        continue;
                    }
                    let near = of_article.iter().copied().filter(|&n| n != gold);
                    questions.push(Question {
                        query: question.question.clone(),
                        answers: question.answers.iter().map(|one| one.text.clone()).collect(),
                        gold: vec![gold],
                        near: near.collect(),
                    });
                }
            }
        }
        Self { documents, questions }
    }

    /// Each titled text in a question's context is a document.
    fn of_hotpot(hotpot: Vec<HotpotQuestion>) -> Self {
        let text = |(title, sentences): &(String, Vec<String>)| format!("{title}\n{}", sentences.concat());
        let contexts = hotpot.iter().flat_map(|question| &question.context);
        let (documents, numbers) = numbered(contexts.map(text));
        let question = |one: &HotpotQuestion| Question {
            query: one.question.clone(),
            answers: vec![one.answer.clone()],
            gold: one.context.iter().map(|part| numbers[&text(part)]).collect(),
            near: Vec::new(),
        };
        Self { questions: hotpot.iter().map(question).collect(), documents }
    }

    /// A random question with `parts` documents in random order: the question's own ones, filled up with others, those
    /// of the same article first.
    pub(super) fn sample(&self, random: &mut Random, parts: usize) -> LongSample {
        let asked = random.below(self.questions.len());
        let question = &self.questions[asked];
        let mut chosen = question.gold.clone();
        let mut near = question.near.clone();
        random.shuffle(&mut near);
        for other in near.into_iter().chain(random.sample(self.documents.len(), self.documents.len())) {
            if chosen.len() >= parts {
                break;
            }
            if !chosen.contains(&other) {
                chosen.push(other);
            }
        }
        random.shuffle(&mut chosen);
        let documents = chosen.iter().enumerate();
        let documents = documents.map(|(n, &one)| format!("Document {}:\n{}", n + 1, self.documents[one]));
        let context = documents.collect::<Vec<_>>().join("\n\n");
        let order = "Answer the question based on the given documents. Only give me the answer and do not output any \
            other words.";
        // HotpotQA does not mark which of a question's ten documents answer it, so only SQuAD has a depth.
        let gold = <[usize; 1]>::try_from(&question.gold[..]).ok();
        let place = gold.and_then(|[gold]| chosen.iter().position(|&one| one == gold));
        LongSample {
            prompt: format!(
                "{order}\n\nThe following are given documents.\n\n{context}\n\n{order}\n\nQuestion: {} Answer:",
                question.query
            ),
            references: question.answers.clone(),
            matching: Match::Any,
            depth: place.and_then(|place| depth(place, chosen.len())),
            wrong: self.wrong(random, question),
        }
    }

    /// Answers of other questions: [`NUM_WRONG`], or fewer in a short file.
    fn wrong(&self, random: &mut Random, question: &Question) -> Vec<String> {
        let mut found: Vec<String> = Vec::new();
        for other in random.sample(self.questions.len(), self.questions.len()) {
            let answer = &self.questions[other].answers[0];
            if found.len() == NUM_WRONG {
                break;
            }
            if !question.answers.contains(answer) && !found.contains(answer) {
                found.push(answer.clone());
            }
        }
        found
    }
}

/// The different texts, sorted, and the index of each.
fn numbered(texts: impl Iterator<Item = String>) -> (Vec<String>, BTreeMap<String, usize>) {
    let mut numbers: BTreeMap<String, usize> = texts.map(|text| (text, 0)).collect();
    for (number, place) in numbers.values_mut().enumerate() {
        *place = number;
    }
    (numbers.keys().cloned().collect(), numbers)
}
