//! Evaluates a kata-agent's policy like the agent: with the agent's engine, and with the request in the JSON form of
//! the agent's own types.

use anyhow::Context;
use protobuf::MessageDyn;
use protobuf::reflect::{ReflectFieldRef, ReflectValueRef, RuntimeFieldType, RuntimeType};
use serde_json::Value;

/// Returns the value of `data.agent_policy.RULE` for a request. `policy` is one text in Rego.
///
/// # Errors
/// When the text is not valid Rego, or the rule has no value; an agent treats both as a refusal.
pub fn allows(policy: &str, rule: &str, request: &dyn MessageDyn) -> anyhow::Result<bool> {
    let mut engine = regorus::Engine::new();
    engine.add_policy("policy.rego".to_owned(), policy.to_owned()).context("read the policy")?;
    engine.set_input_json(&json(request).to_string()).context("read the request")?;
    let query = format!("data.agent_policy.{rule}");
    engine.eval_bool_query(query.clone(), false).with_context(|| format!("ask for {query}"))
}

/// Encodes a message as the agent's types encode to JSON: every field by its name in Rust, unset ones too.
pub fn json(message: &dyn MessageDyn) -> Value {
    let descriptor = message.descriptor_dyn();
    let fields = descriptor.fields().map(|field| {
        let written = match field.get_reflect(message) {
            ReflectFieldRef::Repeated(all) => all.into_iter().map(value).collect::<Value>(),
            ReflectFieldRef::Map(all) => {
                let all = (&all).into_iter().map(|(key, of)| (word(key), value(of)));
                all.collect::<Value>()
            }
            ReflectFieldRef::Optional(_) => match field.runtime_field_type() {
                RuntimeFieldType::Singular(RuntimeType::Message(_)) => {
                    field.get_singular(message).map_or(Value::Null, value)
                }
                _ => value(field.get_singular_field_or_default(message)),
            },
        };
        // `type` is a keyword of Rust.
        let name = if field.name() == "type" { "type_" } else { field.name() };
        (name.to_owned(), written)
    });
    fields.collect()
}

fn value(of: ReflectValueRef<'_>) -> Value {
    match of {
        ReflectValueRef::U32(number) => number.into(),
        ReflectValueRef::U64(number) => number.into(),
        ReflectValueRef::I32(number) | ReflectValueRef::Enum(_, number) => number.into(),
        ReflectValueRef::I64(number) => number.into(),
        ReflectValueRef::F32(number) => number.into(),
        ReflectValueRef::F64(number) => number.into(),
        ReflectValueRef::Bool(is) => is.into(),
        ReflectValueRef::String(text) => text.into(),
        ReflectValueRef::Bytes(bytes) => bytes.into(),
        ReflectValueRef::Message(message) => json(&*message),
    }
}

fn word(key: ReflectValueRef<'_>) -> String {
    match value(key) {
        Value::String(text) => text,
        other => other.to_string(),
    }
}
