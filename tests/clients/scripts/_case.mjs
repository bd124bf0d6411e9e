// What a client's script is asked, and how it reports: as _case.py.

const URL = process.env.KVRECALL_URL ?? "http://127.0.0.1:8420";

export const NAME = "My name is Ada. What is my name?";
export const TURNS = ["My name is Ada.", "The sky is blue.", "What is my name?"];
export const WEATHER = "What is the weather in Bern?";

const NAMED = "Your name is Ada.";
const SUNNY = "sunny in Bern";

export async function run(capabilities) {
  const report = {};
  for (const [name, ask] of Object.entries(capabilities)) {
    const before = await readSessions();
    const error = await attempt(ask, name.includes("tools") ? SUNNY : NAMED);
    const added = (await readSessions()).filter((each) => !before.some((old) => old.id === each.id));
    const turns = added.reduce((sum, each) => sum + each.turns, 0);
    report[name] = { error, sessions: added.length, turns };
  }
  console.log(JSON.stringify(report));
}

async function attempt(ask, wanted) {
  try {
    const text = await ask();
    return text.includes(wanted) ? null : `said ${JSON.stringify(text).slice(0, 200)}`;
  } catch (error) {
    console.error(error);
    return String(error).slice(0, 300);
  }
}

async function readSessions() {
  return (await (await fetch(`${URL}/v1/sessions?limit=100`)).json()).sessions;
}
