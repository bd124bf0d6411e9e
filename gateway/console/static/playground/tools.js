// @ts-check
/** Tools of the playground: those that the reference model was trained on (`reference/tools.py`). */

/** @typedef {{name: string, description: string, argument: string, result: string}} ToolKind */

/** @type {ToolKind[]} */
export const TOOLS = [
  { name: 'on_call', description: 'Who is on call on a day.', argument: 'day', result: 'person' },
  { name: 'ticket_owner', description: 'Who owns a ticket.', argument: 'ticket', result: 'owner' },
  { name: 'room_booking', description: 'Who booked a room.', argument: 'room', result: 'guest' },
  { name: 'team_lead', description: 'Who leads a team.', argument: 'team', result: 'lead' },
  { name: 'last_caller', description: 'Who called a line last.', argument: 'line', result: 'caller' },
];

/** A tool in OpenAI's form. */
export function toSchema(/** @type {ToolKind} */ { name, description, argument }) {
  return {
    type: 'function',
    function: {
      name,
      description,
      parameters: { type: 'object', properties: { [argument]: { type: 'string' } }, required: [argument] },
    },
  };
}

/** A result to begin with, which may be edited. */
export function exampleResult(/** @type {string} */ name, person = 'Melnor') {
  const tool = TOOLS.find((each) => each.name === name);
  // With the space that models read after a colon.
  return `{"${tool?.result ?? 'result'}": ${JSON.stringify(person)}}`;
}
