//! The parts of a template once it is read.

use super::fault::{Fallible, Fault};
use std::sync::Arc;

/// Levels of an expression or of blocks within each other. Published templates have ten.
pub(super) const MOST_DEPTH: u32 = 300;

/// Statements in their order.
pub(super) type Body = Vec<Node>;

/// A statement, and its line.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) line: u32,
    pub(super) kind: NodeKind,
}

#[derive(Debug)]
pub(super) enum NodeKind {
    /// Text between tags.
    Data(String),
    /// `{{ … }}`
    Print(Expr),
    For(Arc<For>),
    /// Conditions with their bodies, and the last `else`.
    If(Vec<(Expr, Body)>, Body),
    Set(Target, Expr),
    /// `{% set x %}…{% endset %}`, with filters behind the name.
    SetBlock(Target, Vec<FilterCall>, Body),
    With(Vec<(Target, Expr)>, Body),
    Macro(Arc<Macro>),
    /// `{% call … %}`: the call and the macro `caller`.
    Call(Expr, Arc<Macro>),
    Filter(Vec<FilterCall>, Body),
    /// What the assistant writes.
    Generation(Body),
    /// `{% block … %}`
    Block(Body),
    Break,
    Continue,
    /// What a template in memory cannot do, such as `{% include %}`.
    Refused(&'static str),
}

/// `{% for … %}`
#[derive(Debug)]
pub(super) struct For {
    pub(super) target: Target,
    pub(super) items: Expr,
    pub(super) condition: Option<Expr>,
    pub(super) is_recursive: bool,
    /// Whether the body or the condition names `loop`.
    pub(super) names_loop: bool,
    pub(super) body: Body,
    pub(super) otherwise: Body,
}

/// `{% macro … %}`, or the body of `{% call %}`.
#[derive(Debug)]
pub(super) struct Macro {
    pub(super) name: String,
    pub(super) params: Vec<(String, Option<Expr>)>,
    pub(super) body: Body,
    pub(super) names_varargs: bool,
    pub(super) names_kwargs: bool,
}

/// What a value is assigned to.
#[derive(Debug)]
pub(super) enum Target {
    Name(String),
    /// An attribute of a namespace.
    Attribute(String, String),
    Tuple(Vec<Target>),
}

/// An expression that knows its depth, so that no walk over it is deeper than [`MOST_DEPTH`].
#[derive(Debug)]
pub(super) struct Expr {
    pub(super) kind: Box<ExprKind>,
    depth: u32,
}

#[derive(Debug)]
pub(super) enum ExprKind {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    Name(String),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    /// Value, condition, other value.
    If(Expr, Expr, Option<Expr>),
    Or(Expr, Expr),
    And(Expr, Expr),
    Not(Expr),
    Compare(Expr, Vec<(Comparison, Expr)>),
    Binary(Operator, Expr, Expr),
    Concat(Vec<Expr>),
    Negative(Expr),
    Positive(Expr),
    Attribute(Expr, String),
    Item(Expr, Expr),
    Slice(Expr, [Option<Expr>; 3]),
    Call(Expr, Arguments),
    Filter(Expr, FilterCall),
    Test {
        value: Expr,
        name: String,
        arguments: Arguments,
        is_negated: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
    NotIn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operator {
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Remainder,
    Power,
}

/// A filter's name and arguments.
#[derive(Debug)]
pub(super) struct FilterCall {
    pub(super) line: u32,
    pub(super) name: String,
    pub(super) arguments: Arguments,
}

/// Arguments of a call.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Expr>,
    pub(super) named: Vec<(String, Expr)>,
    /// `*list`
    pub(super) splat: Option<Expr>,
    /// `**dictionary`
    pub(super) named_splat: Option<Expr>,
}

impl Arguments {
    /// All expressions in them.
    pub(super) fn expressions(&self) -> impl Iterator<Item = &Expr> {
        let named = self.named.iter().map(|(_, value)| value);
        self.positional.iter().chain(named).chain(&self.splat).chain(&self.named_splat)
    }
}

impl Expr {
    /// # Errors
    /// An expression of more than [`MOST_DEPTH`] levels.
    pub(super) fn new(kind: ExprKind, line: u32) -> Fallible<Self> {
        let depth = 1 + kind.parts().into_iter().map(|part| part.depth).max().unwrap_or(0);
        if depth > MOST_DEPTH {
            let what = format!("an expression has more than {MOST_DEPTH} operators within each other");
            return Err(Fault::invalid(what, line));
        }
        Ok(Self { kind: Box::new(kind), depth })
    }
}

impl ExprKind {
    /// The expressions that this one is made of.
    pub(super) fn parts(&self) -> Vec<&Expr> {
        match self {
            Self::None | Self::Bool(_) | Self::Int(_) | Self::Float(_) | Self::Text(_) | Self::Name(_) => Vec::new(),
            Self::List(items) | Self::Tuple(items) | Self::Concat(items) => items.iter().collect(),
            Self::Dict(pairs) => pairs.iter().flat_map(|(key, value)| [key, value]).collect(),
            Self::If(value, condition, other) => [value, condition].into_iter().chain(other).collect(),
            Self::Or(a, b) | Self::And(a, b) | Self::Binary(_, a, b) | Self::Item(a, b) => vec![a, b],
            Self::Not(value) | Self::Negative(value) | Self::Positive(value) | Self::Attribute(value, _) => vec![value],
            Self::Compare(first, others) => {
                std::iter::once(first).chain(others.iter().map(|(_, other)| other)).collect()
            }
            Self::Slice(value, bounds) => std::iter::once(value).chain(bounds.iter().flatten()).collect(),
            Self::Call(callee, arguments) => std::iter::once(callee).chain(arguments.expressions()).collect(),
            Self::Filter(value, call) => std::iter::once(value).chain(call.arguments.expressions()).collect(),
            Self::Test { value, arguments, .. } => std::iter::once(value).chain(arguments.expressions()).collect(),
        }
    }
}
