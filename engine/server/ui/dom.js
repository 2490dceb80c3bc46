// Elements made by code. What servers, models and strangers say goes in as text and can become nothing else.

const drawn = new WeakMap();

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/**
 * A new element. `attributes`: by name; false leaves one out, a function under "onclick" listens. `children`: elements,
 * or strings, which become text.
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** Set the text of an element, only if it is another one: what is selected stays selected. */
export function say(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Replace the children of `target` if `state` is another one than last time; whether it was. */
export function redraw(target, state, children) {
  const key = JSON.stringify(state);
  if (drawn.get(target) === key) return false;
  drawn.set(target, key);
  target.replaceChildren(...children());
  return true;
}
