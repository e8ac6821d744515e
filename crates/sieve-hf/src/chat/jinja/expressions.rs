//! Values of expressions.

use super::fault::{Fallible, Fault};
use super::printf;
use super::python::{place, slice_bounds, slice_places, text};
use super::render::{Given, Renderer, append};
use super::syntax::{Arguments, Comparison, Expr, ExprKind, Operator};
use super::value::{Items, LoopState, Text, Value, range_len};
use std::cell::Cell;
use std::cmp::Ordering;
use std::rc::Rc;

/// Functions that a template finds without a variable of the name.
/// (`lipsum` and `self` are known and refused.)
pub(super) const FUNCTIONS: [&str; 9] =
    ["range", "dict", "namespace", "cycler", "joiner", "raise_exception", "strftime_now", "lipsum", "self"];
/// Longest list that `range` makes, as in the sandbox of jinja2.
const MOST_RANGE: usize = 100_000;

impl Renderer<'_> {
    /// The value of an expression.
    pub(super) fn value(&mut self, expr: &Expr) -> Fallible<Value> {
        self.budget.steps(1)?;
        self.deeper(|renderer| renderer.value_of(&expr.kind))
    }

    fn values<'e>(&mut self, items: impl IntoIterator<Item = &'e Expr>) -> Fallible<Vec<Value>> {
        items.into_iter().map(|item| self.value(item)).collect()
    }

    /// The value of a kind of expression; `choice` has the operators that need not look at both sides, `part_of` what
    /// is behind a value.
    fn value_of(&mut self, kind: &ExprKind) -> Fallible<Value> {
        Ok(match kind {
            ExprKind::None => Value::None,
            ExprKind::Bool(value) => Value::Bool(*value),
            ExprKind::Int(value) => Value::Int(*value),
            ExprKind::Float(value) => Value::Float(*value),
            ExprKind::Text(text) => Value::text(text, self.budget)?,
            ExprKind::Name(name) => self.named(name)?,
            ExprKind::List(items) => Value::list(self.values(items)?, self.budget)?,
            ExprKind::Tuple(items) => Value::tuple(self.values(items)?, self.budget)?,
            ExprKind::Dict(pairs) => {
                let pairs = pairs.iter().map(|(key, value)| Ok((self.value(key)?, self.value(value)?)));
                let pairs = pairs.collect::<Fallible<_>>()?;
                Value::dict(pairs, self.budget)?
            }
            ExprKind::If(..) | ExprKind::Or(..) | ExprKind::And(..) | ExprKind::Not(_) => self.choice(kind)?,
            ExprKind::Compare(first, others) => self.compare(first, others)?,
            ExprKind::Binary(operator, left, right) => {
                let (left, right) = (self.value(left)?, self.value(right)?);
                self.binary(*operator, &left, &right)?
            }
            ExprKind::Concat(items) => self.concat(items)?,
            ExprKind::Negative(value) => match self.value(value)?.defined()? {
                Value::Float(value) => Value::Float(-value),
                other => other.as_int().and_then(i128::checked_neg).map(Value::Int).ok_or_else(|| no_number(other))?,
            },
            ExprKind::Positive(value) => match self.value(value)?.defined()? {
                Value::Float(value) => Value::Float(*value),
                other => other.as_int().map(Value::Int).ok_or_else(|| no_number(other))?,
            },
            ExprKind::Call(..) => self.call(kind, None)?,
            _ => self.part_of(kind)?,
        })
    }

    /// The operators that need not look at both sides.
    fn choice(&mut self, kind: &ExprKind) -> Fallible<Value> {
        match kind {
            ExprKind::If(value, condition, _) if self.value(condition)?.is_true() => self.value(value),
            ExprKind::If(_, _, Some(other)) => self.value(other),
            ExprKind::Or(left, right) => {
                let left = self.value(left)?;
                if left.is_true() { Ok(left) } else { self.value(right) }
            }
            ExprKind::And(left, right) => {
                let left = self.value(left)?;
                if left.is_true() { self.value(right) } else { Ok(left) }
            }
            ExprKind::Not(value) => Ok(Value::Bool(!self.value(value)?.is_true())),
            _ => Ok(Value::undefined("an if without else has no value".to_owned())),
        }
    }

    /// What is behind a value: an attribute, an item, a filter or a test.
    fn part_of(&mut self, kind: &ExprKind) -> Fallible<Value> {
        match kind {
            ExprKind::Attribute(value, name) => {
                let value = self.value(value)?;
                self.attribute(&value, name)
            }
            ExprKind::Item(value, key) => {
                let (value, key) = (self.value(value)?, self.value(key)?);
                self.item(&value, &key)
            }
            ExprKind::Slice(value, [start, end, step]) => {
                let value = self.value(value)?;
                let mut bound =
                    |bound: &Option<Expr>| bound.as_ref().map_or(Ok(Value::None), |bound| self.value(bound));
                let bounds = [bound(start)?, bound(end)?, bound(step)?];
                self.slice(&value, &bounds)
            }
            ExprKind::Filter(value, call) => {
                let value = self.value(value)?;
                let given = self.given(&call.arguments)?;
                self.filter(&call.name, value, given).map_err(|fault| fault.at(call.line))
            }
            ExprKind::Test { value, name, arguments, is_negated } => {
                let value = self.value(value)?;
                let given = self.given(arguments)?;
                Ok(Value::Bool(self.test(name, &value, given)? != *is_negated))
            }
            _ => Err(Fault::refused("an expression is not known")),
        }
    }

    fn named(&self, name: &str) -> Fallible<Value> {
        if let Some(value) = self.variable(name)? {
            return Ok(value);
        }
        let function = FUNCTIONS.iter().find(|found| **found == name);
        Ok(function.map_or_else(|| Value::undefined(format!("{name} is not defined")), |name| Value::Function(name)))
    }

    /// A chain of comparisons as in Python: each value is compared with the one before it, and behind the first that
    /// fails none is evaluated.
    fn compare(&mut self, first: &Expr, others: &[(Comparison, Expr)]) -> Fallible<Value> {
        let mut left = self.value(first)?;
        for (comparison, right) in others {
            let right = self.value(right)?;
            let holds = match comparison {
                Comparison::Equal => left.equals(&right, self.budget)?,
                Comparison::NotEqual => !left.equals(&right, self.budget)?,
                Comparison::In => right.contains(&left, self.budget)?,
                Comparison::NotIn => !right.contains(&left, self.budget)?,
                Comparison::Less => left.order(&right, self.budget)? == Some(Ordering::Less),
                Comparison::Greater => left.order(&right, self.budget)? == Some(Ordering::Greater),
                Comparison::LessOrEqual => left.order(&right, self.budget)?.is_some_and(Ordering::is_le),
                Comparison::GreaterOrEqual => left.order(&right, self.budget)?.is_some_and(Ordering::is_ge),
            };
            if !holds {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    /// The texts of values one behind the other, with what `{% generation %}` blocks wrote of them.
    fn concat(&mut self, items: &[Expr]) -> Fallible<Value> {
        let mut out = Text::default();
        for item in items {
            match self.value(item)? {
                Value::Text(found) => {
                    self.budget.text(found.text.len())?;
                    append(&mut out, &found.text, &found.marks);
                }
                other => out.text += &text(&other, self.budget)?,
            }
        }
        Ok(Value::Text(Rc::new(out)))
    }

    /// What Python's operator makes of two values: texts, lists and tuples are joined and repeated, a text formats by
    /// `%`, and all else must be numbers.
    pub(super) fn binary(&mut self, operator: Operator, left: &Value, right: &Value) -> Fallible<Value> {
        let budget = self.budget;
        match (operator, left.defined()?, right.defined()?) {
            (Operator::Add, Value::Text(a), Value::Text(b)) => {
                budget.text(a.text.len() + b.text.len())?;
                let mut out = Text::default();
                append(&mut out, &a.text, &a.marks);
                append(&mut out, &b.text, &b.marks);
                Ok(Value::Text(Rc::new(out)))
            }
            (Operator::Add, Value::List(a), Value::List(b)) => {
                budget.list(a.items.len() + b.items.len())?;
                Value::list(a.items.iter().chain(&b.items).cloned().collect(), budget)
            }
            (Operator::Add, Value::Tuple(a), Value::Tuple(b)) => {
                budget.list(a.items.len() + b.items.len())?;
                Value::tuple(a.items.iter().chain(&b.items).cloned().collect(), budget)
            }
            (Operator::Remainder, Value::Text(format), values) => {
                Ok(Value::made(printf::percent(&format.text, values, budget)?))
            }
            (Operator::Multiply, list, count) if is_list(list) => self.repeat(list, count),
            (Operator::Multiply, count, list) if is_list(list) => self.repeat(list, count),
            _ => number(operator, left, right),
        }
    }

    /// A text, list or tuple so many times behind itself; none for a negative `count`. A text loses its marks.
    fn repeat(&mut self, list: &Value, count: &Value) -> Fallible<Value> {
        let count = count.as_int().ok_or_else(|| no_number(count))?;
        let count = usize::try_from(count.max(0)).unwrap_or(usize::MAX);
        match list {
            Value::Text(text) => {
                self.budget.text(text.text.len().saturating_mul(count))?;
                Ok(Value::made(text.text.repeat(count)))
            }
            Value::List(items) | Value::Tuple(items) => {
                self.budget.list(items.items.len().saturating_mul(count))?;
                let repeated =
                    if items.items.is_empty() { Vec::new() } else { vec![items.items.clone(); count].concat() };
                if matches!(list, Value::List(_)) {
                    Value::list(repeated, self.budget)
                } else {
                    Value::tuple(repeated, self.budget)
                }
            }
            other => Err(no_number(other)),
        }
    }

    /// `value.name`
    ///
    /// # Errors
    /// A value that is not there.
    pub(super) fn attribute(&mut self, value: &Value, name: &str) -> Fallible<Value> {
        self.budget.steps(1)?;
        let found = match value.defined()? {
            Value::Namespace(namespace) => {
                let values = namespace.borrow();
                self.budget.steps(values.len() / 8)?;
                values.iter().find(|(found, _)| found == name).map(|(_, value)| value.clone())
            }
            Value::Loop(state) => self.loop_attribute(value, state, name)?,
            Value::Dict(dict) if !Self::has_method(value, name) => {
                self.budget.steps(dict.pairs.len() / 8)?;
                dict.get_name(name).cloned()
            }
            Value::Cycler(cycler) if name == "current" => Some(cycler.0.items[cycler.1.get()].clone()),
            Value::Tuple(group) if group.items.len() == 2 && ["grouper", "list"].contains(&name) => {
                Some(group.items[usize::from(name == "list")].clone())
            }
            other => Self::has_method(other, name).then(|| Value::Method(Rc::new((value.clone(), name.to_owned())))),
        };
        Ok(found.unwrap_or_else(|| Value::undefined(format!("a {} has no {name}", value.kind()))))
    }

    /// `loop.name` for the loop `state`, which `value` holds; `None` for a name that loops do not have.
    fn loop_attribute(&mut self, value: &Value, state: &LoopState, name: &str) -> Fallible<Option<Value>> {
        let (index, len) = (state.index.get(), state.items.items.len());
        let item = |index: usize, what: &str| {
            let found = state.items.items.get(index).cloned();
            found.unwrap_or_else(|| Value::undefined(format!("there is no {what} item")))
        };
        Ok(Some(match name {
            "index" => Value::from(index + 1),
            "index0" => Value::from(index),
            "revindex" => Value::from(len - index),
            "revindex0" => Value::from(len - index - 1),
            "first" => Value::Bool(index == 0),
            "last" => Value::Bool(index + 1 == len),
            "length" => Value::from(len),
            "depth" => Value::from(state.level + 1),
            "depth0" => Value::from(state.level),
            "previtem" => item(index.wrapping_sub(1), "previous"),
            "nextitem" => item(index + 1, "next"),
            "cycle" | "changed" => Value::Method(Rc::new((value.clone(), name.to_owned()))),
            _ => return Ok(None),
        }))
    }

    /// `value[key]`
    ///
    /// # Errors
    /// A value that is not there.
    pub(super) fn item(&mut self, value: &Value, key: &Value) -> Fallible<Value> {
        let found = match (value.defined()?, key.as_int()) {
            (Value::Dict(dict), _) => match key {
                Value::List(_) | Value::Dict(_) => None,
                key => dict.get(key, self.budget)?.cloned(),
            },
            (Value::List(items) | Value::Tuple(items), Some(index)) => {
                place(index, items.items.len()).map(|at| items.items[at].clone())
            }
            (Value::Range(range), Some(index)) => {
                let len = range_len(range);
                place(index, len).map(|at| Value::Int(range[0] + at as i128 * range[2]))
            }
            (Value::Text(text), Some(index)) => {
                self.budget.scan(2 * text.text.len())?;
                let at = place(index, text.text.chars().count());
                at.and_then(|at| text.text.chars().nth(at)).map(|c| Value::made(c.to_string()))
            }
            _ => None,
        };
        match (found, key) {
            (Some(found), _) => Ok(found),
            // As in jinja2, an attribute stands in for an item that is not there.
            (None, Value::Text(name)) if !matches!(value, Value::Dict(_)) || Self::has_method(value, &name.text) => {
                self.attribute(value, &name.text)
            }
            (None, Value::Text(name)) => Ok(Value::undefined(format!("a {} has no {:?}", value.kind(), name.text))),
            (None, _) => Ok(Value::undefined(format!("a {} has no such item", value.kind()))),
        }
    }

    /// `value[start:end:step]` as in Python, where a bound that is missing is `None`; undefined for a value without
    /// slices.
    fn slice(&mut self, value: &Value, bounds: &[Value; 3]) -> Fallible<Value> {
        match value.defined()? {
            Value::List(items) => {
                let found = slice_places(bounds, items.items.len())?;
                self.budget.list(found.len())?;
                Value::list(found.into_iter().map(|at| items.items[at].clone()).collect(), self.budget)
            }
            Value::Tuple(items) => {
                let found = slice_places(bounds, items.items.len())?;
                self.budget.list(found.len())?;
                Value::tuple(found.into_iter().map(|at| items.items[at].clone()).collect(), self.budget)
            }
            Value::Text(text) => {
                self.budget.text(5 * text.text.len())?;
                let chars = text.text.chars().collect::<Vec<_>>();
                let found = slice_places(bounds, chars.len())?;
                Ok(Value::made(found.into_iter().map(|at| chars[at]).collect()))
            }
            Value::Range(range) => {
                // As in Python, a slice of a range is a range.
                let [start, end, step] = slice_bounds(bounds, range_len(range))?;
                let at = |place: i128| range[0] + place * range[2];
                Ok(Value::Range(Rc::new([at(start), at(end), step * range[2]])))
            }
            other => Ok(Value::undefined(format!("a {} has no slices", other.kind()))),
        }
    }

    /// The values of arguments.
    pub(super) fn given(&mut self, arguments: &Arguments) -> Fallible<Given> {
        let mut args = self.values(&arguments.positional)?;
        let mut named = Vec::with_capacity(arguments.named.len());
        for (name, value) in &arguments.named {
            named.push((name.clone(), self.value(value)?));
        }
        if let Some(splat) = &arguments.splat {
            args.extend(self.value(splat)?.items(self.budget)?);
        }
        if let Some(splat) = &arguments.named_splat {
            let Value::Dict(dict) = self.value(splat)? else {
                return Err(Fault::refused("** is not followed by a dictionary"));
            };
            for (key, value) in &dict.pairs {
                let name = key.as_str().ok_or_else(|| Fault::refused("an argument's name is not a string"))?;
                named.push((name.to_owned(), value.clone()));
            }
        }
        self.budget.list(args.len() + named.len())?;
        Ok(Given { args, named })
    }

    /// A call in `{% call %}`, which has a caller.
    pub(super) fn call_with(&mut self, call: &Expr, caller: Option<Value>) -> Fallible<Value> {
        self.deeper(|renderer| renderer.call(&call.kind, caller))
    }

    /// The value of a call, whose callee is evaluated before its arguments. `caller`, the body of `{% call %}`, becomes
    /// the argument of that name.
    fn call(&mut self, kind: &ExprKind, caller: Option<Value>) -> Fallible<Value> {
        let ExprKind::Call(callee, arguments) = kind else {
            return Err(Fault::refused("{% call %} has no call"));
        };
        let callee = self.value(callee)?;
        let mut given = self.given(arguments)?;
        given.named.extend(caller.map(|caller| ("caller".to_owned(), caller)));
        self.call_value(&callee, given)
    }

    /// Calls a macro, a function, a method, a recursive loop, or a joiner, which is empty the first time and its
    /// separator from then on.
    fn call_value(&mut self, callee: &Value, given: Given) -> Fallible<Value> {
        match callee.defined()? {
            Value::Macro(found) => self.call_macro(found, given),
            Value::Function(name) => self.function(name, given),
            Value::Method(method) => self.method(&method.0, &method.1, given),
            Value::Loop(state) => {
                let [items] = given.bind("loop", ["iterable"])?;
                self.call_loop(state, &items.unwrap_or(Value::None))
            }
            Value::Joiner(joiner) => {
                let was_asked = joiner.1.replace(true);
                if was_asked { Ok(joiner.0.clone()) } else { Value::text("", self.budget) }
            }
            other => Err(Fault::refused(format!("a {} cannot be called", other.kind()))),
        }
    }

    /// Calls one of [`FUNCTIONS`]; `lipsum`, `self` and a `cycler` without items are refused.
    fn function(&mut self, name: &str, given: Given) -> Fallible<Value> {
        match name {
            "range" => range(&given),
            "dict" | "namespace" => {
                let mut pairs = Vec::new();
                for arg in &given.args {
                    let Value::Dict(dict) = arg else {
                        return Err(Fault::refused(format!("{name} takes a dictionary, not a {}", arg.kind())));
                    };
                    pairs.extend(dict.pairs.iter().cloned());
                }
                for (key, value) in given.named {
                    pairs.push((Value::text(&key, self.budget)?, value));
                }
                if name == "dict" {
                    return Value::dict(pairs, self.budget);
                }
                let pairs = pairs.into_iter().map(|(key, value)| Ok((text(&key, self.budget)?, value)));
                let pairs = pairs.collect::<Fallible<_>>()?;
                self.namespace(pairs)
            }
            "cycler" if !given.args.is_empty() => {
                Ok(Value::Cycler(Rc::new((Items::new(given.args, self.budget)?, Cell::new(0)))))
            }
            "joiner" => {
                let [separator] = given.bind(name, ["sep"])?;
                let separator = separator.unwrap_or_else(|| Value::made(", ".to_owned()));
                Value::list(vec![separator.clone()], self.budget)?;
                Ok(Value::Joiner(Rc::new((separator, Cell::new(false)))))
            }
            "raise_exception" => {
                let [message] = given.bind(name, ["message"])?;
                Err(Fault::refused(text(&message.unwrap_or(Value::None), self.budget)?))
            }
            "strftime_now" => {
                let [format] = given.bind(name, ["format"])?;
                let format = format.as_ref().and_then(Value::as_str).unwrap_or_default();
                self.budget.text(64 * format.len())?;
                Ok(Value::made(printf::time_now(format)?))
            }
            _ => Err(Fault::refused(format!("{name} is called without its arguments"))),
        }
    }
}

impl Given {
    /// The arguments by the names of a function's parameters.
    ///
    /// # Errors
    /// More than it takes, or an unknown name.
    pub(super) fn bind<const N: usize>(self, function: &str, names: [&str; N]) -> Fallible<[Option<Value>; N]> {
        let mut found = [const { None }; N];
        if self.args.len() > N {
            return Err(Fault::refused(format!("{function} takes {N} arguments at most")));
        }
        for (place, value) in found.iter_mut().zip(self.args) {
            *place = Some(value);
        }
        for (name, value) in self.named {
            match names.iter().position(|found| *found == name) {
                Some(at) if found[at].is_none() => found[at] = Some(value),
                _ => return Err(Fault::refused(format!("{function} takes no argument {name} here"))),
            }
        }
        Ok(found)
    }
}

fn is_list(value: &Value) -> bool {
    matches!(value, Value::Text(_) | Value::List(_) | Value::Tuple(_))
}

fn no_number(value: &Value) -> Box<Fault> {
    Fault::refused(format!("a {} is used as a number", value.kind()))
}

/// Python's `range` of one to three whole numbers, of at most [`MOST_RANGE`] items.
fn range(given: &Given) -> Fallible<Value> {
    let whole = |value: &Value| {
        let value = value.as_int().ok_or_else(|| no_number(value))?;
        i64::try_from(value).map(i128::from).map_err(|_| Fault::limit("a bound of range is too large"))
    };
    let range = match given.args.as_slice() {
        _ if !given.named.is_empty() => return Err(Fault::refused("range takes no argument with a name")),
        [end] => [0, whole(end)?, 1],
        [start, end] => [whole(start)?, whole(end)?, 1],
        [start, end, step] => [whole(start)?, whole(end)?, whole(step)?],
        _ => return Err(Fault::refused("range takes one to three numbers")),
    };
    if range[2] == 0 {
        return Err(Fault::refused("range has the step 0"));
    }
    if range_len(&range) > MOST_RANGE {
        return Err(Fault::limit(format!("range makes more than {MOST_RANGE} numbers")));
    }
    Ok(Value::Range(Rc::new(range)))
}

/// What an operator makes of two numbers, as in Python.
fn number(operator: Operator, left: &Value, right: &Value) -> Fallible<Value> {
    if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
        return whole(operator, a, b);
    }
    let (Some(a), Some(b)) = (left.as_float(), right.as_float()) else {
        let what = format!("a {} and a {} do not go with this operator", left.kind(), right.kind());
        return Err(Fault::refused(what));
    };
    let divides = matches!(operator, Operator::Divide | Operator::FloorDivide | Operator::Remainder);
    if divides && b == 0.0 {
        return Err(Fault::refused("a number is divided by 0"));
    }
    Ok(Value::Float(match operator {
        Operator::Add => a + b,
        Operator::Subtract => a - b,
        Operator::Multiply => a * b,
        Operator::Divide => a / b,
        // Rounded once, after the remainder: the quotient 1 / 0.1 would round up to 10, and its floor is 9.
        Operator::FloorDivide => ((a - remainder(a, b)) / b).round(),
        Operator::Remainder => remainder(a, b),
        Operator::Power => return power(a, b),
    }))
}

/// The remainder of `a / b`, with the sign of `b`, as Python's `%`.
fn remainder(a: f64, b: f64) -> f64 {
    let rest = a % b;
    if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest }
}

/// `a ** b` of floats. Python has an error for 0 to a negative power and for a result that is too large, and a complex
/// number, which no template has, for a negative number to a fraction.
fn power(a: f64, b: f64) -> Fallible<Value> {
    match a.powf(b) {
        _ if a == 0.0 && b < 0.0 => Err(Fault::refused("0 is raised to a negative power")),
        found if found.is_infinite() && a.is_finite() && b.is_finite() => Err(Fault::limit("a power is too large")),
        found if found.is_nan() && !a.is_nan() && !b.is_nan() => {
            Err(Fault::refused("a negative number is raised to a fraction"))
        }
        found => Ok(Value::Float(found)),
    }
}

/// What an operator makes of two whole numbers, as in Python: `/` is a float, `//` rounds down, and a remainder has the
/// sign of `b`. A result beyond i128 is refused.
fn whole(operator: Operator, a: i128, b: i128) -> Fallible<Value> {
    let divides = matches!(operator, Operator::Divide | Operator::FloorDivide | Operator::Remainder);
    if divides && b == 0 {
        return Err(Fault::refused("a number is divided by 0"));
    }
    let found = match operator {
        Operator::Add => a.checked_add(b),
        Operator::Subtract => a.checked_sub(b),
        Operator::Multiply => a.checked_mul(b),
        Operator::Divide => return Ok(Value::Float(a as f64 / b as f64)),
        Operator::FloorDivide => {
            a.checked_div_euclid(b).map(|found| if b < 0 && found * b != a { found - 1 } else { found })
        }
        Operator::Remainder => a.checked_rem_euclid(b).map(|found| if b < 0 && found != 0 { found + b } else { found }),
        Operator::Power if b < 0 => return power(a as f64, b as f64),
        Operator::Power => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
    };
    found.map(Value::Int).ok_or_else(|| Fault::limit("a number has more than 38 digits"))
}
