//! Values of a template, as Python has them.

use super::fault::{Budget, Fallible, Fault, VALUE_BYTES};
use super::syntax::{For, Macro};
use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// Lists and dictionaries within each other, so that no walk over a value is deeper.
pub(super) const MOST_NESTED: u32 = 200;

const _: () = assert!(size_of::<Value>() <= VALUE_BYTES);

/// A value. A list or dictionary never changes: the sandbox of `transformers` has no method that would.
#[derive(Clone, Debug)]
pub(super) enum Value {
    /// What is not there, and the sentence about it.
    Undefined(Rc<str>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Rc<Text>),
    List(Rc<Items>),
    Tuple(Rc<Items>),
    Dict(Rc<Dict>),
    /// Keys, values or pairs of a dictionary.
    View(&'static str, Rc<Items>),
    /// Start, end and step.
    Range(Rc<[i128; 3]>),
    /// A generator, which is read once.
    Stream(Rc<Stream>),
    Namespace(Namespace),
    Macro(Rc<BoundMacro>),
    /// A function of the environment.
    Function(&'static str),
    /// A value and one of its methods.
    Method(Rc<(Value, String)>),
    Loop(Rc<LoopState>),
    Cycler(Rc<(Items, Cell<usize>)>),
    /// A separator, and whether it was asked for before.
    Joiner(Rc<(Value, Cell<bool>)>),
}

/// Names and values that a template may change.
pub(super) type Namespace = Rc<RefCell<Vec<(String, Value)>>>;

/// A text, and what of it `{% generation %}` blocks wrote.
#[derive(Debug, Default)]
pub(super) struct Text {
    pub(super) text: String,
    pub(super) marks: Vec<Mark>,
}

/// What a `{% generation %}` block wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::chat) struct Mark {
    /// Number of the block, in the order of rendering.
    pub(super) number: u32,
    /// The bytes of the text.
    pub(in crate::chat) bytes: Range<usize>,
    /// The message that a loop was at.
    pub(in crate::chat) message: Option<usize>,
}

/// Items of a list or tuple.
#[derive(Debug, Default)]
pub(super) struct Items {
    pub(super) items: Vec<Value>,
    depth: u32,
}

/// A dictionary in the order of its making.
#[derive(Debug, Default)]
pub(super) struct Dict {
    pub(super) pairs: Vec<(Value, Value)>,
    depth: u32,
    /// The message that this is, by its number.
    pub(super) message: Option<usize>,
}

/// What a generator has left.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) items: RefCell<VecDeque<Value>>,
    depth: u32,
}

/// A macro and the scope that it was made in.
#[derive(Debug)]
pub(super) struct BoundMacro {
    pub(super) code: Arc<Macro>,
    pub(super) scope: ScopeId,
}

/// A scope by its place and by a number that no other scope has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScopeId {
    pub(super) place: usize,
    pub(super) number: u64,
}

/// Where a loop is.
#[derive(Debug)]
pub(super) struct LoopState {
    pub(super) items: Rc<Items>,
    pub(super) index: Cell<usize>,
    /// Loops around this one that called it.
    pub(super) level: usize,
    /// What `loop.changed` had last.
    pub(super) changed: RefCell<Option<Vec<Value>>>,
    pub(super) code: Arc<For>,
    pub(super) scope: ScopeId,
}

impl Items {
    /// # Errors
    /// More than [`MOST_NESTED`] levels, or more than the budget has.
    pub(super) fn new(items: Vec<Value>, budget: &Budget) -> Fallible<Self> {
        budget.list(items.len())?;
        let depth = level_over(items.iter())?;
        Ok(Self { items, depth })
    }
}

impl Dict {
    /// # Errors
    /// As [`Items::new`]; a key that is a list or dictionary.
    pub(super) fn new(pairs: Vec<(Value, Value)>, budget: &Budget) -> Fallible<Self> {
        budget.list(2 * pairs.len())?;
        let depth = level_over(pairs.iter().flat_map(|(key, value)| [key, value]))?;
        let mut dict = Self { pairs: Vec::with_capacity(pairs.len()), depth, message: None };
        for (key, value) in pairs {
            match dict.place(&key, budget)? {
                Some(place) => dict.pairs[place].1 = value,
                None => dict.pairs.push((key, value)),
            }
        }
        Ok(dict)
    }

    /// The place of the pair whose key is equal to this one; a list, dictionary or view is refused.
    fn place(&self, key: &Value, budget: &Budget) -> Fallible<Option<usize>> {
        if let Value::List(_) | Value::Dict(_) | Value::View(..) = key {
            return Err(Fault::refused(format!("a {} is not a key of a dictionary", key.kind())));
        }
        budget.steps(self.pairs.len() / 8)?;
        if let Value::Text(key) = key {
            return Ok(self.pairs.iter().position(|(found, _)| found.as_str() == Some(&key.text)));
        }
        for (place, (found, _)) in self.pairs.iter().enumerate() {
            if found.equals(key, budget)? {
                return Ok(Some(place));
            }
        }
        Ok(None)
    }

    pub(super) fn get(&self, key: &Value, budget: &Budget) -> Fallible<Option<&Value>> {
        Ok(self.place(key, budget)?.map(|place| &self.pairs[place].1))
    }

    pub(super) fn get_name(&self, name: &str) -> Option<&Value> {
        self.pairs.iter().find(|(key, _)| key.as_str() == Some(name)).map(|(_, value)| value)
    }
}

/// The depth of a value that holds these.
fn level_over<'a>(values: impl Iterator<Item = &'a Value>) -> Fallible<u32> {
    let depth = 1 + values.map(Value::depth).max().unwrap_or(0);
    if depth > MOST_NESTED {
        return Err(Fault::limit(format!("it nests lists and dictionaries more than {MOST_NESTED} levels deep")));
    }
    Ok(depth)
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<usize> for Value {
    fn from(value: usize) -> Self {
        Self::Int(value as i128)
    }
}

impl Value {
    /// A text that was counted before it was made.
    pub(super) fn made(text: String) -> Self {
        Self::Text(Rc::new(Text { text, marks: Vec::new() }))
    }

    /// A text.
    pub(super) fn text(text: &str, budget: &Budget) -> Fallible<Self> {
        budget.text(text.len())?;
        Ok(Self::made(text.to_owned()))
    }

    pub(super) fn list(items: Vec<Value>, budget: &Budget) -> Fallible<Self> {
        Ok(Self::List(Rc::new(Items::new(items, budget)?)))
    }

    pub(super) fn tuple(items: Vec<Value>, budget: &Budget) -> Fallible<Self> {
        Ok(Self::Tuple(Rc::new(Items::new(items, budget)?)))
    }

    pub(super) fn stream(items: Vec<Value>, budget: &Budget) -> Fallible<Self> {
        budget.list(items.len())?;
        let depth = level_over(items.iter())?;
        Ok(Self::Stream(Rc::new(Stream { items: RefCell::new(items.into()), depth })))
    }

    pub(super) fn dict(pairs: Vec<(Value, Value)>, budget: &Budget) -> Fallible<Self> {
        Ok(Self::Dict(Rc::new(Dict::new(pairs, budget)?)))
    }

    /// A value that is not there, and why.
    pub(super) fn undefined(why: String) -> Self {
        Self::Undefined(why.into())
    }

    /// How many lists and dictionaries are within each other. A namespace counts as none: it is emptied at the end.
    fn depth(&self) -> u32 {
        match self {
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => items.depth,
            Self::Dict(dict) => dict.depth,
            Self::Stream(stream) => stream.depth,
            Self::Method(method) => 1 + method.0.depth(),
            Self::Loop(state) => 1 + state.items.depth,
            Self::Cycler(cycler) => 1 + cycler.0.depth,
            Self::Joiner(joiner) => 1 + joiner.0.depth(),
            _ => 0,
        }
    }

    /// Python's name of the type, more or less.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "value that is not defined",
            Self::None => "None",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Text(_) => "text",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Dict(_) => "dictionary",
            Self::View(name, _) => name,
            Self::Range(_) => "range",
            Self::Stream(_) => "generator",
            Self::Namespace(_) => "namespace",
            Self::Macro(_) => "macro",
            Self::Function(_) => "function",
            Self::Method(_) => "method",
            Self::Loop(_) => "loop",
            Self::Cycler(_) => "cycler",
            Self::Joiner(_) => "joiner",
        }
    }

    pub(super) fn as_str(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(&text.text) } else { None }
    }

    /// A whole number, which true and false are too.
    pub(super) fn as_int(&self) -> Option<i128> {
        match self {
            Self::Int(value) => Some(*value),
            Self::Bool(value) => Some(i128::from(*value)),
            _ => None,
        }
    }

    /// A number.
    pub(super) fn as_float(&self) -> Option<f64> {
        if let Self::Float(value) = self { Some(*value) } else { self.as_int().map(|value| value as f64) }
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(_))
    }

    /// The fault of using a value that is not there; `None` for others.
    pub(super) fn defined(&self) -> Fallible<&Self> {
        if let Self::Undefined(why) = self { Err(Fault::refused(why.to_string())) } else { Ok(self) }
    }

    /// Whether `if` takes its branch.
    pub(super) fn is_true(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(value) => *value,
            Self::Int(value) => *value != 0,
            Self::Float(value) => *value != 0.0,
            Self::Text(text) => !text.text.is_empty(),
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => !items.items.is_empty(),
            Self::Dict(dict) => !dict.pairs.is_empty(),
            Self::Range(range) => range_len(range) > 0,
            _ => true,
        }
    }

    /// Python's `len`; `None` of a value without one.
    pub(super) fn len(&self) -> Option<usize> {
        match self {
            Self::Undefined(_) => Some(0),
            Self::Text(text) => Some(text.text.chars().count()),
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => Some(items.items.len()),
            Self::Dict(dict) => Some(dict.pairs.len()),
            Self::Range(range) => Some(range_len(range)),
            Self::Loop(state) => Some(state.items.items.len()),
            _ => None,
        }
    }

    /// The items that a loop over this value has.
    ///
    /// # Errors
    /// A value that is no list.
    pub(super) fn items(&self, budget: &Budget) -> Fallible<Vec<Value>> {
        let items = match self {
            Self::Undefined(_) => Vec::new(),
            Self::Text(text) => {
                budget.list(text.text.len())?;
                text.text.chars().map(|c| Self::made(c.to_string())).collect()
            }
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => {
                budget.list(items.items.len())?;
                items.items.clone()
            }
            Self::Dict(dict) => {
                budget.list(dict.pairs.len())?;
                dict.pairs.iter().map(|(key, _)| key.clone()).collect()
            }
            Self::Range(range) => {
                budget.list(range_len(range))?;
                (0..range_len(range) as i128).map(|n| Self::Int(range[0] + n * range[2])).collect()
            }
            Self::Stream(stream) => stream.items.take().into(),
            other => return Err(Fault::refused(format!("a {} is not a list", other.kind()))),
        };
        Ok(items)
    }

    /// Python's `==`.
    ///
    /// # Errors
    /// More steps than the budget has.
    pub(super) fn equals(&self, other: &Self, budget: &Budget) -> Fallible<bool> {
        budget.steps(1)?;
        Ok(match (self, other) {
            (Self::Undefined(_), Self::Undefined(_)) | (Self::None, Self::None) => true,
            (Self::Text(a), Self::Text(b)) => {
                budget.scan(a.text.len().min(b.text.len()))?;
                a.text == b.text
            }
            (Self::List(a), Self::List(b)) | (Self::Tuple(a), Self::Tuple(b)) => {
                if a.items.len() != b.items.len() {
                    return Ok(false);
                }
                for (a, b) in a.items.iter().zip(&b.items) {
                    if !a.equals(b, budget)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Self::Dict(a), Self::Dict(b)) => {
                if a.pairs.len() != b.pairs.len() {
                    return Ok(false);
                }
                for (key, value) in &a.pairs {
                    match b.get(key, budget)? {
                        Some(found) if found.equals(value, budget)? => {}
                        _ => return Ok(false),
                    }
                }
                true
            }
            (Self::Namespace(a), Self::Namespace(b)) => Rc::ptr_eq(a, b),
            (Self::Range(a), Self::Range(b)) => a == b,
            (Self::Function(a), Self::Function(b)) => a == b,
            (a, b) => match (a.as_int(), b.as_int()) {
                (Some(a), Some(b)) => a == b,
                _ => matches!((a.as_float(), b.as_float()), (Some(a), Some(b)) if a == b),
            },
        })
    }

    /// The order of two values.
    ///
    /// # Errors
    /// Values that have none, such as a number and a text.
    pub(super) fn order(&self, other: &Self, budget: &Budget) -> Fallible<Option<Ordering>> {
        budget.steps(1)?;
        match (self.defined()?, other.defined()?) {
            (Self::Text(a), Self::Text(b)) => {
                budget.scan(a.text.len().min(b.text.len()))?;
                return Ok(Some(a.text.cmp(&b.text)));
            }
            (Self::List(a), Self::List(b)) | (Self::Tuple(a), Self::Tuple(b)) => {
                for (a, b) in a.items.iter().zip(&b.items) {
                    if !a.equals(b, budget)? {
                        return a.order(b, budget);
                    }
                }
                return Ok(Some(a.items.len().cmp(&b.items.len())));
            }
            _ => {}
        }
        match (self.as_int(), other.as_int(), self.as_float(), other.as_float()) {
            (Some(a), Some(b), ..) => Ok(Some(a.cmp(&b))),
            (_, _, Some(a), Some(b)) => Ok(a.partial_cmp(&b)),
            _ => Err(Fault::refused(format!("a {} and a {} have no order", self.kind(), other.kind()))),
        }
    }

    /// Python's `item in self`.
    ///
    /// # Errors
    /// A value that holds nothing.
    pub(super) fn contains(&self, item: &Self, budget: &Budget) -> Fallible<bool> {
        match self {
            Self::Text(text) => {
                let Some(part) = item.as_str() else {
                    let what = format!("a {} is looked for in a string, which contains only strings", item.kind());
                    return Err(Fault::refused(what));
                };
                budget.scan(text.text.len())?;
                Ok(text.text.contains(part))
            }
            Self::Dict(dict) => Ok(dict.get(item, budget)?.is_some()),
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => among(&items.items, item, budget),
            Self::Range(range) => Ok(item.as_int().is_some_and(|number| {
                let [start, _, step] = **range;
                let far = number.saturating_sub(start);
                far % step == 0 && (0..range_len(range) as i128).contains(&(far / step))
            })),
            other => among(&other.items(budget)?, item, budget),
        }
    }
}

/// Whether one of the items is equal to `item`, as Python compares them.
fn among(items: &[Value], item: &Value, budget: &Budget) -> Fallible<bool> {
    for found in items {
        if found.equals(item, budget)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Number of items of a range whose step is not 0.
pub(super) fn range_len(&[start, end, step]: &[i128; 3]) -> usize {
    let span = if step > 0 { end - start } else { start - end };
    let step = step.unsigned_abs() as i128;
    usize::try_from((span.max(0) + step - 1) / step).unwrap_or(usize::MAX)
}
