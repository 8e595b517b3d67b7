// The public port's page: the chat alone.

import { Announcer } from "./announce.js";
import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { Key, tell, wireKeyForm } from "./key.js";
import { Talk } from "./talk.js";

const key = new Key();
const talk = new Talk(new Api(key));

async function greet() {
  try {
    setText(byId("model"), (await talk.findModel()) ?? "no model");
    tell(key.value ? "The key works." : "");
  } catch (error) {
    tell(error.line ?? error.message, true);
  }
}

new Chat(talk, new Announcer(byId("announcements")));
key.onchange = greet;
wireKeyForm(byId("key-form"), key);
greet();
