//! Jinja as `transformers` renders it, with bounds: the language of chat templates.
//!
//! A template is a stranger's program. It is read and rendered on a thread whose stack is known, its size and depth are
//! bounded before it is read, and each step, text and list that it makes is counted while it runs, so that it ends with
//! a text or a sentence. Values are Python's: lists and tuples, whole numbers and floats, dictionaries in their order.

mod checks;
mod expressions;
mod fault;
mod filters;
mod json;
mod lexer;
mod lists;
mod methods;
mod names;
mod parser;
mod printf;
mod python;
mod render;
mod syntax;
mod value;

pub(super) use fault::{Budget, Fallible, Fault, FaultKind};
pub(super) use value::Mark;

use names::Names;
use render::Renderer;
use serde_json::Value as Json;
use std::thread;
use syntax::Body;
use value::Value;

/// Bytes of the stack of a thread that reads or renders a template: each of the levels that
/// [`Renderer::deeper`] counts may take 30 KiB of it.
const STACK_BYTES: usize = 64 << 20;

/// A template that was read.
#[derive(Debug)]
pub(super) struct Program {
    body: Body,
    names: Names,
}

/// What a template is rendered with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Input<'a> {
    pub(super) messages: &'a [Json],
    /// Other variables; the last of a name counts.
    pub(super) variables: &'a [(&'a str, &'a Json)],
    pub(super) begins_answer: bool,
    /// Whether each `{% generation %}` block must be found in the text.
    pub(super) needs_marks: bool,
}

impl Program {
    /// Reads a template.
    ///
    /// # Errors
    /// A template that is not valid, or larger or deeper than any that was published.
    pub(super) fn parse(template: &str) -> Fallible<Self> {
        let body = parser::parse(template)?;
        let names = Names::of(&body);
        Ok(Self { body, names })
    }

    /// Whether the template asks anything for this key by its name.
    pub(super) fn names_key(&self, key: &str) -> bool {
        self.names.keys.contains(key)
    }

    /// Variables that the template reads before it sets them, without functions.
    pub(super) fn variables(&self) -> impl Iterator<Item = &str> {
        let names = self.names.variables.iter().map(String::as_str);
        names.filter(|name| !expressions::FUNCTIONS.contains(name))
    }

    /// Whether the template has a `{% generation %}` block.
    pub(super) fn has_generation(&self) -> bool {
        self.names.has_generation
    }

    /// The text of a chat, and what its `{% generation %}` blocks wrote.
    ///
    /// # Errors
    /// A template that refuses the messages, or takes more than its budget.
    pub(super) fn render(&self, input: Input<'_>, budget: &Budget) -> Fallible<(String, Vec<Mark>)> {
        let mut variables = Vec::new();
        for (name, value) in input.variables {
            variables.push(((*name).to_owned(), json::value(value, budget)?));
        }
        let messages =
            input.messages.iter().enumerate().map(|(number, message)| json::message(message, number, budget));
        let messages = Value::list(messages.collect::<Fallible<_>>()?, budget)?;
        variables.push(("messages".to_owned(), messages));
        variables.push(("add_generation_prompt".to_owned(), Value::Bool(input.begins_answer)));
        let text = Renderer::new(variables, budget).render(&self.body, input.needs_marks)?;
        Ok((text.text, text.marks))
    }
}

/// Calls `work` on a thread whose stack is large enough for any template that the limits let through.
///
/// # Errors
/// A system that gives no thread.
pub(super) fn on_own_stack<T: Send>(work: impl FnOnce() -> Fallible<T> + Send) -> Fallible<T> {
    thread::scope(|scope| {
        let started =
            thread::Builder::new().name("template".to_owned()).stack_size(STACK_BYTES).spawn_scoped(scope, work);
        match started {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(error) => Err(Fault::refused(format!("the system gives no thread to render it on: {error}"))),
        }
    })
}
